"""``make test-clients``: clients with heavy dependencies against ``specdec up``, in an environment of their own.

Each asks for the same greedy text, whole and as a stream. lm-eval gives the same numbers with speculation on and off.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def add(first, second):\n    return first + second\n\n\ndef subtract("
MODEL = "target"
TASK = {
    "task": "tiny",
    "dataset_path": "json",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        found: dict[str, Any] = json.load(response)
    return found


def expected(url: str) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text: str = posted(f"{url}/completions", body)["choices"][0]["text"]
    return text


def langchain(url: str) -> tuple[str, str]:
    from langchain_openai import OpenAI

    client = OpenAI(base_url=url, api_key="any", model=MODEL, temperature=0, max_tokens=24)
    return client.invoke(PROMPT), "".join(client.stream(PROMPT))


def llama_index(url: str) -> tuple[str, str]:
    from llama_index.llms.openai_like import OpenAILike

    client = OpenAILike(model=MODEL, api_base=url, api_key="any", temperature=0, max_tokens=24, is_chat_model=False)
    return client.complete(PROMPT).text, "".join(part.delta or "" for part in client.stream_complete(PROMPT))


def llm(url: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as home:
        known = [{"model_id": MODEL, "model_name": MODEL, "api_base": url, "completion": True}]
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps(known))
        command = [str(Path(sys.executable).parent / "llm"), "-m", MODEL, "-o", "temperature", "0", "-o", "max_tokens"]
        environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "any"}

        def ran(*flags: str) -> str:
            asked = [*command, "24", "--key", "any", *flags, PROMPT]
            return subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout[:-1]

        return ran("--no-stream"), ran()


def lm_eval(url: str) -> list[float]:
    """The numbers of a tiny task, with speculation and without."""
    numbers = []
    with tempfile.TemporaryDirectory() as directory:
        questions = [{"question": PROMPT, "answer": expected(url).split("\n")[0]}, {"question": "x", "answer": "no"}]
        data = Path(directory) / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, questions)))
        task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (Path(directory) / "tiny.yaml").write_text(json.dumps(task))
        for number in ("", ",num_draft_tokens=0"):
            given = f"model={MODEL},base_url={url}/completions,tokenizer_backend=remote,num_concurrent=1"
            command = [str(Path(sys.executable).parent / "lm_eval"), "--model=local-completions", "--tasks=tiny"]
            flags = [f"--include_path={directory}", f"--output_path={directory}/out{number}"]
            generation = "--gen_kwargs=temperature=0" + number
            subprocess.run([*command, *flags, f"--model_args={given}", generation], check=True, capture_output=True)
            [file] = Path(f"{directory}/out{number}").rglob("results_*.json")
            results = json.loads(file.read_text())["results"]["tiny"]
            numbers.append(next(value for name, value in results.items() if name.startswith("exact_match,")))
    return numbers


CLIENTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "langchain-openai": langchain,
    "llama-index-llms-openai-like": llama_index,
    "llm": llm,
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def main() -> None:
    grpc, http = free_port(), free_port()
    command = [str(ROOT / ".venv" / "bin" / "specdec"), "up", f"--port={grpc}", f"--http-port={http}"]
    services = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url, wrong = f"http://127.0.0.1:{http}/v1", 0
    try:
        for _ in range(120):
            time.sleep(1)
            try:
                text = expected(url)
                break
            except OSError:
                continue
        else:
            raise SystemExit("specdec up does not answer")
        for name, ask in CLIENTS.items():
            whole, streamed = ask(url)
            right = whole.rstrip("\n") == streamed.rstrip("\n") == text.rstrip("\n")
            wrong += not right
            print(f"{name}: {'the same text, whole and as a stream' if right else f'{whole!r}, {streamed!r}'}")
        drafted, alone = lm_eval(url)
        wrong += drafted != alone
        print(f"lm-eval: {drafted} with speculation, {alone} without")
    finally:
        services.send_signal(signal.SIGINT)
        services.wait()
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
