"""The command line as a user meets it: by exit status and what it prints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from rich.console import Console

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.cli import demo, up
from specdec.cli.fetch import FetchError
from specdec.cli.main import BENCHES
from specdec.cli.processes import free_ports, python_command
from specdec.core.settings import EngineSettings
from specdec.server import model_server
from specdec.telemetry import setup as telemetry
from target_service.language_model import LmVerifier
from tests.checkout import DEMO, ROOT
from tests.cluster import Cluster, cluster
from tests.models.table_runner import TableRunner
from tests.specdec.cli.commands import TERMINAL, called, invoke, program, without_ours

with_services = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Cluster]:
    """A cluster whose models speak the demo's vocabulary, so that there is text."""
    runners = [TableRunner(vocab_size=4096, order=1, seed=1, blend=blend) for blend in (None, (2, 0.2))]
    models = [LmVerifier(runners[0])], [LanguageModelDrafter(runners[1])]
    async with cluster(*models, tokenizer=str(DEMO / "target")) as running:
        yield running


def in_a_process(
    *arguments: str, directory: Path, module: str = "specdec.cli.main", **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENTS``."""
    command = [sys.executable, "-m", module, *arguments]
    variables = without_ours() | TERMINAL | environment
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The demo's target with a tokenizer that cannot be read."""
    for file in (DEMO / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')
    return tmp_path


def test_every_benchmark_is_listed_and_exists():
    status, listed, _ = invoke("bench", "--help")
    assert status == 0
    for module in BENCHES:
        assert f" {module.rpartition('.')[2].replace('_', '-')} " in listed
        assert importlib.util.find_spec(f"bench.{module}"), module


@pytest.mark.slow
def test_a_benchmark_runs_from_every_directory(tmp_path):
    ran = in_a_process("bench", "load", "--help", directory=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Usage: specdec bench load" in ran.stdout


def test_help_names_the_commands_and_their_flags():
    status, listed, _ = invoke("--help")
    of_generate, of_serve = invoke("generate", "--help"), invoke("serve", "--help")
    bare_status, *bare = invoke()
    assert (status, of_generate[0], of_serve[0]) == (0, 0, 0)
    for command in ("serve", "up", "demo", "generate", "health", "doctor"):
        assert command in listed
        assert command in "".join(bare)
    for flag in ("--max-tokens", "--temperature", "--no-speculation", "--json", "--address", "--verification"):
        assert flag in of_generate[1]
    assert "target|draft|orchestrator" in of_serve[1]
    assert bare_status != 1, "a call without a command is no failure of the deployment"


@pytest.mark.slow
def test_serve_runs_a_service_that_refuses_a_broken_model_and_lets_its_threads_sleep(broken):
    """A module of the service's name in the working directory is not run. libgomp itself reports the spin count."""
    (broken / "target_service.py").write_text("raise SystemExit('the wrong module')")
    settings = {"OMP_DISPLAY_ENV": "verbose"}
    ran = in_a_process("serve", "target", f"--model={broken}", directory=broken, **settings)
    assert ran.returncode == 2
    assert "is no tokenizer.json that can be read" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "-P" in python_command("target_service")
    if platform.system() == "Linux":  # GNU's OpenMP is torch's on Linux alone
        assert "GOMP_SPINCOUNT = '10000'" in ran.stderr


@with_services
async def test_generate_prints_one_json_object_and_speculation_does_not_change_it(served):
    address = f"--address=127.0.0.1:{served.orchestrator.port}"
    request = ("generate", "def main(", "--max-tokens=24", "--seed=5", address)
    answers = []
    for flags in ((), ("--no-speculation",)):
        status, out, err = await called(*request, "--json", *flags)
        assert (status, err, out.count("\n")) == (0, "", 1)
        answers.append(json.loads(out))
    [sample] = await served.client.generate(text="def main(", max_tokens=24, seed=5)
    # In a pipe the text comes as it is.
    assert await called(*request) == (0, sample.text + "\n", "")
    for answer in answers:
        assert (answer["text"], answer["token_ids"]) == (sample.text, sample.token_ids)
        assert (answer["finish_reason"], answer["seed"], answer["usage"]["completion_tokens"]) == ("length", 5, 24)
        assert answer["usage"]["prompt_tokens"] > 0
    with_draft, without = (answer["speculation"] for answer in answers)
    assert with_draft["num_accepted_tokens"] > 0
    assert with_draft["num_rounds"] < without["num_rounds"] == 24
    assert without["num_drafts"] == 0


@with_services
async def test_generate_passes_every_option_on(served):
    request = dict(text="x", max_tokens=8, seed=9, temperature=0.5, top_p=0.9, top_k=50, min_p=0.01)
    [plain] = await served.client.generate(**request)
    bias = {plain.token_ids[0]: -100.0, plain.token_ids[-1]: 0.5}
    request |= dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=3)
    [sample] = await served.client.generate(**request, logit_bias=bias)
    assert plain.token_ids[0] not in sample.token_ids
    stop = sample.text[len(sample.text) // 2 :][:2]
    [stopped] = await served.client.generate(**request, logit_bias=bias, stop=[stop])
    options = [f"--{name.replace('_', '-')}={value}" for name, value in request.items() if name != "text"]
    options += [f"--logit-bias={token}={value}" for token, value in bias.items()]
    status, out, _ = await called(
        *("generate", "x", "--json", f"--address=127.0.0.1:{served.orchestrator.port}", *options),
        *(f"--stop={stop}", "--verification=coupled", "--num-draft-tokens=2"),
    )
    assert status == 0
    answer = json.loads(out)
    assert (answer["text"], answer["finish_reason"]) == (stopped.text, "stop")
    assert stopped.text != sample.text


@with_services
async def test_generate_says_what_is_wrong_in_a_sentence_and_exits_with_1(served):
    [port] = free_ports(1)
    unreachable = await called("generate", "x", f"--address=127.0.0.1:{port}", "--timeout-s=5")
    address = f"--address=127.0.0.1:{served.orchestrator.port}"
    refused = await called("generate", "x", "--top-p=7", "--temperature=-1", address)
    for (status, out, err), words in (
        (unreachable, ["[REPLICA_LOST]"]),
        (refused, ["top_p", "temperature", "[INVALID_ARGUMENT]"]),
    ):
        assert (status, out) == (1, "")
        assert err.startswith("specdec: ")
        assert len(err.splitlines()) == 1
        assert all(word in err for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate x --verification=hope", "hope"),
        ("generate x --max-tokens=-1", "--max-tokens"),
        ("generate x --seed=-1", "--seed"),
        ("generate x --max-tokens=99999999999", "99999999999"),
        ("generate x --logit-bias=-1=2", "ID=BIAS"),
        ("demo --max-tokens=0", "--max-tokens"),
        ("serve nonsense", "'nonsense' is none of target, draft, orchestrator, gateway"),
        ("up --certificates=/no/such", "no certificates as `specdec certificates` makes them"),
        ("up --logs=/dev/null", "no log can be written in /dev/null: File exists"),
    ],
)
def test_a_bad_argument_is_refused_in_words(arguments, words):
    status, _, err = invoke(*arguments.split())
    assert status == (1 if arguments.startswith("up") else 2)
    assert words in err


@pytest.mark.parametrize(("flags", "engines"), [((), []), (("--engine=vllm",), ["--engine=vllm"])])
def test_both_models_of_up_have_the_engine_that_is_named_else_that_of_the_environment(flags, engines, monkeypatch):
    given = {}

    async def run(*models, **options):
        given.update(options)

    monkeypatch.setattr(up, "run", run)
    assert invoke("up", *flags)[0] == 0
    assert [flag for flag in given["arguments"] if flag.startswith("--engine")] == engines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("target_service --model=x --dtype=float7 --port=-1", ["--dtype", "--port"]),
        *(
            (f"{service} --host=0.0.0.0", ["0.0.0.0 can be reached from other machines"])
            for service in ("target_service --model=x", "draft_service --model=x", "orchestrator --target=127.0.0.1:1")
        ),
        ("orchestrator --target=nowhere", ["--target", "not host:port"]),
        (
            "orchestrator --target=127.0.0.1:1 --tokenizer=/no/such",
            ["/no/such is neither a tokenizer.json, nor a directory with one"],
        ),
        (
            f"orchestrator --target=127.0.0.1:1 --tokenizer={DEMO / 'target'} --revision=v1",
            ["--revision is for hub ids"],
        ),
        ("orchestrator --target=127.0.0.1:1 --tokenizer=BROKEN", ["is no tokenizer.json that can be"]),
    ],
)
def test_a_service_with_bad_flags_exits_with_2_and_names_them(arguments, words, broken):
    status, out, err = program(*arguments.replace("BROKEN", str(broken)).split())
    assert (status, out) == (2, "")
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no such model"), "no such model"),
        (ImportError("No torch"), "No torch; pip install -e '.[models]' in a checkout has it"),
        (ImportError("No numpy", name="numpy"), "No numpy; pip install -e '.[ngram]' in a checkout has it"),
    ],
)
def test_a_model_that_cannot_be_loaded_exits_with_2_and_a_sentence(capsys, monkeypatch, error, sentence):
    def build():
        raise error

    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setattr(telemetry, "set_up", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        model_server.run(EngineSettings(), "target", build)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"specdec target: {sentence}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacking", "extra", "command"),
    [
        ("torch", "models", "target_service --model=none --self-draft=recycling"),
        ("numpy", "ngram", "draft_service --ngram=none.npz"),
        ("numpy", "ngram", "draft_service.ngram_build text --tokenizer=text --output=model.npz"),
        ("uvicorn", "http", "gateway --orchestrator=127.0.0.1:1"),
    ],
)
def test_a_package_that_is_not_installed_is_told_in_a_sentence(tmp_path, lacking, extra, command):
    (tmp_path / f"{lacking}.py").write_text(f"raise ModuleNotFoundError('No module named {lacking}', name='{lacking}')")
    (tmp_path / "text").write_text("a")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, "-m", *command.split()]
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.endswith(f": No module named {lacking}; pip install -e '.[{extra}]' in a checkout has it\n")
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_port_in_use_exits_with_1_and_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = in_a_process("--target=127.0.0.1:1", f"--port={port}", module="orchestrator", directory=tmp_path)
    assert ran.returncode == 1
    assert f"specdec orchestrator: cannot listen on 127.0.0.1:{port}" in ran.stderr
    assert "Traceback" not in ran.stderr


@with_services
async def test_health_says_whether_a_service_serves_by_its_exit_status(served):
    [port] = free_ports(1)
    address = f"127.0.0.1:{served.orchestrator.port}"
    assert await called("health", address) == (0, "SERVING\n", "")
    assert await called("health", address, "--service=liveness") == (0, "SERVING\n", "")
    assert (await called("health", address, "--service=no.such"))[:2] == (1, "NOT_SERVING\n")
    assert (await called("health", f"127.0.0.1:{port}"))[:2] == (1, "NOT_SERVING\n")


@pytest.mark.parametrize("max_tokens", [1, 24])
@with_services
async def test_the_demo_compares_both_ways_and_measures_no_text_that_is_too_short(max_tokens, served, monkeypatch):
    address = f"127.0.0.1:{served.orchestrator.port}"

    @asynccontextmanager
    async def deployment(*_, **__):
        yield [SimpleNamespace(name=name, address=address) for name in ("target", "draft", "orchestrator")]

    monkeypatch.setattr(demo, "deployment", deployment)
    console = Console(record=True, width=300)
    bundled = demo.Scene.bundled()
    for scene in (bundled, dataclasses.replace(bundled, head=bundled.draft, num_draft_tokens=None)):
        assert await demo.run(console, scene, max_tokens=max_tokens, temperatures=(0.7, 0.0), seed=7)
        shown = console.export_text()
        assert "target alone, T = 0.7" in shown
        assert "target alone, greedy" in shown
        assert "All outputs are token-identical." in shown
        assert ("too short" in shown) is (max_tokens == 1)
        assert ("with its head" in shown) is (scene.head is not None)


def test_where_the_real_model_cannot_be_had_the_demo_is_that_of_the_repository(monkeypatch):
    def fails(tell):
        raise FetchError("no network")

    monkeypatch.setattr(demo, "make", fails)
    console = Console(record=True, width=80)
    assert demo.scene(console, ["Why?"], None) == demo.Scene.bundled()
    assert "no network" in console.export_text()
