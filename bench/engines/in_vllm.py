"""vLLM's own generate in a process, for a caller that writes lines of JSON.

``python -m bench.engines.in_vllm MODEL DRAFT HOW THREADS NUM_DRAFT_TOKENS``. A line in is {"prompts": [[id ...] ...],
"max_tokens": n, "end_token_ids": [id ...]}, a line out {"seconds": s, "outputs": [[id ...] ...]}; the first line out,
{}, comes when the model is loaded. Knows vLLM's public interface alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CONTEXT_TOKENS = 2048


def main() -> None:
    model, draft, how, threads, num_draft_tokens = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints to standard output is no answer
    # On no core of their own, as the services' threads.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads, "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # GiB
    from vllm import LLM, SamplingParams

    drafting: dict[str, dict[str, Any]] = {"draft_model": {"model": draft}, "ngram": {"prompt_lookup_max": 4}}
    speculative = {"method": how, "num_speculative_tokens": int(num_draft_tokens), **drafting.get(how, {})}
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        speculative_config=speculative if how in drafting else None,
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=asked["max_tokens"],
            stop_token_ids=asked["end_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        started = time.perf_counter()
        generated = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        outputs = [list(request.outputs[0].token_ids) for request in generated]
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=answers, flush=True)


if __name__ == "__main__":
    main()
