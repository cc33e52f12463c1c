"""AIPerf."""

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
            flags = {
                "model": MODEL,
                "url": servers.demo.removesuffix("/v1"),
                "endpoint-type": kind,
                "tokenizer": load.TOKENIZER,
                "synthetic-input-tokens-mean": load.PROMPT_TOKENS,
                "output-tokens-mean": load.OUTPUT_TOKENS,
                "request-rate": load.REQUESTS_PER_S,
                "benchmark-duration": load.SECONDS,
                "artifact-dir": directory,
                "ui-type": "none",
            }
            arguments = [f"--{name}={value}" for name, value in flags.items()]
            load.run([str(Path(sys.executable).parent / "aiperf"), "profile", *arguments, "--streaming"])
            [file] = Path(directory).rglob("profile_export_aiperf.json")
            result = json.loads(file.read_text())
            scene.equal(result.get("error_summary"), [])
            return float(result["time_to_first_token"]["p50"])

    return load.equal_first_tokens(median_ttft_ms)


if __name__ == "__main__":
    scene.run("aiperf", time_to_first_token)
