"""GuideLLM."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.clients import load, scene
from tests.clients.scene import MODEL, Servers


def time_to_first_token(servers: Servers) -> str:
    def median_ttft_ms(kind: str) -> float:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "result.json"
            path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[kind]
            flags = {
                "backend": f"kind=openai_http,target={servers.demo},model={MODEL},request_format={path}",
                "profile": f"kind=constant,rate={load.REQUESTS_PER_S}",
                "constraint": f"kind=max_duration,seconds={load.SECONDS}",
                "tokenizer": f"kind=hf_auto,model={load.TOKENIZER}",
                "data": f"kind=synthetic_text,prompt_tokens={load.PROMPT_TOKENS},output_tokens={load.OUTPUT_TOKENS}",
                "output": f"kind=json,path={file}",
            }
            arguments = [f"--{name}={value}" for name, value in flags.items()]
            load.run([str(Path(sys.executable).parent / "guidellm"), "run", *arguments, "--disable-console"])
            metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
            assert metrics["request_totals"]["successful"], "no request was answered"
            scene.equal(metrics["request_totals"]["errored"], 0)
            return float(metrics["time_to_first_token_ms"]["successful"]["median"])

    return load.equal_first_tokens(median_ttft_ms)


if __name__ == "__main__":
    scene.run("guidellm", time_to_first_token)
