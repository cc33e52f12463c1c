"""The command ``llm``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal


def completions(servers: Servers) -> None:
    expected = scene.completed(servers).rstrip("\n")
    with tempfile.TemporaryDirectory() as home:
        models = [{"model_id": MODEL, "model_name": MODEL, "api_base": servers.demo, "completion": True}]
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps(models))
        command = [str(Path(sys.executable).parent / "llm"), "--model", MODEL, "--key", "any", scene.PROMPT]
        command += ["--option", "temperature", "0", "--option", "max_tokens", "24"]
        environment = {**os.environ, "LLM_USER_PATH": home}
        for flags in (["--no-stream"], []):
            answer = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, check=True)
            equal(answer.stdout.rstrip("\n"), expected)


if __name__ == "__main__":
    scene.run("llm", completions)
