"""vLLM alone or with drafts of its own in a process, for a caller that writes lines of JSON.

``python -m bench.engines.in_vllm MODEL DRAFT HOW THREADS NUM_DRAFT_TOKENS``. A line in is {"prompts": [[id ...] ...],
"max_tokens": [n ...], "num_live": n, "num_tokens": n, "end_token_ids": [id ...]}: the prompts of a window. A line out
is {"seconds": s, "outputs": [{"ids": [id ...], "is_cut": b} ...]}, of the first prompts; the first line out, {}, comes
when the model is loaded. Knows vLLM's public interface alone.

vLLM's worker is in this process, as in our services with one device: on a CPU it is faster so than by vLLM's default.
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
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    torch.set_num_threads(int(threads))  # vLLM's worker takes the function away
    from vllm import EngineArgs, LLMEngine

    drafting: dict[str, dict[str, Any]] = {"draft_model": {"model": draft}, "ngram": {"prompt_lookup_max": 4}}
    speculative = {"method": how, "num_speculative_tokens": int(num_draft_tokens), **drafting.get(how, {})}
    arguments = EngineArgs(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        speculative_config=speculative if how in drafting else None,
    )
    engine = LLMEngine.from_engine_args(arguments)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(engine, json.loads(line))), file=answers, flush=True)


def answered(engine: Any, asked: Any) -> dict[str, Any]:
    """``engine``: vLLM's LLMEngine."""
    from vllm import SamplingParams

    outputs: list[dict[str, Any]] = []

    def add_next() -> None:
        index = len(outputs)
        if index == len(asked["prompts"]):
            return
        params = SamplingParams(
            temperature=0.0,
            max_tokens=asked["max_tokens"][index],
            stop_token_ids=asked["end_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(str(index), {"prompt_token_ids": asked["prompts"][index]}, params)
        outputs.append({"ids": [], "is_cut": True})

    started = time.perf_counter()
    for _ in range(asked["num_live"]):
        add_next()
    while engine.has_unfinished_requests() and sum(len(each["ids"]) for each in outputs) < asked["num_tokens"]:
        for request in engine.step():
            outputs[int(request.request_id)] = {"ids": request.outputs[0].token_ids, "is_cut": not request.finished}
            if request.finished:
                add_next()
    seconds = time.perf_counter() - started
    engine.abort_request([str(index) for index, output in enumerate(outputs) if output["is_cut"]])
    return {"seconds": seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
