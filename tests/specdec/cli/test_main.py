"""The command line as a user meets it: in processes of its own, by exit status and what it prints."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.cli.main import BENCHES, app
from specdec.cli.processes import free_ports
from specdec.core.settings import EngineSettings
from specdec.server import model_server as model_service
from specdec.telemetry import setup as telemetry
from target_service.language_model import LmVerifier
from tests.checkout import ROOT
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

TOKENIZER = str(ROOT / "models" / "demo" / "target")


async def run(
    *arguments: str,
    module: str = "specdec.cli.main",
    environment: dict[str, str] | None = None,
    directory: Path = ROOT,
) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SPECDEC_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=directory,
        env=clean | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"} | (environment or {}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert "Traceback" not in err.decode(), err.decode()
    return process.returncode or 0, out.decode(), err.decode()


def served():
    """A cluster whose models speak the demo's vocabulary, so that there is text."""
    runners = [TableRunner(vocab_size=4096, order=1, seed=1, blend=blend) for blend in (None, (2, 0.2))]
    return cluster([LmVerifier(runners[0])], [LanguageModelDrafter(runners[1])], tokenizer=TOKENIZER)


@pytest.mark.slow
async def test_a_benchmark_is_found_wherever_one_stands(tmp_path: Path):
    status, out, err = await run("bench", "lookup", "--help", directory=tmp_path)
    assert (status, err) == (0, "")
    assert "guessing" in out


def test_every_benchmark_is_listed_and_there():
    there_is = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["bench", "--help"])
    assert there_is.exit_code == 0
    for module in BENCHES:
        assert f" {module.rpartition('.')[2]} " in there_is.output
        assert importlib.util.find_spec(f"bench.{module}"), module


def test_help_says_what_there_is():
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    there_is = runner.invoke(app, ["--help"])
    of_generate = runner.invoke(app, ["generate", "--help"])
    bare = runner.invoke(app, [])
    assert (there_is.exit_code, of_generate.exit_code) == (0, 0)
    for command in ("serve", "up", "demo", "generate", "health", "doctor"):
        assert command in there_is.output
        assert command in bare.output
    for flag in ("--max-tokens", "--temperature", "--no-speculation", "--json", "--address", "--verification"):
        assert flag in of_generate.output
    assert bare.exit_code != 1, "asking for nothing is no failure of the deployment"


@pytest.mark.slow
async def test_serve_by_itself_says_which_roles_there_are():
    status, out, err = await run("serve", "--help")
    assert (status, err) == (0, "")
    assert "target|draft|orchestrator" in out
    status, out, err = await run("serve", "nonsense")
    assert (status, out) == (2, "")
    assert "'nonsense' is none of target, draft, orchestrator" in err


@pytest.mark.slow
async def test_a_services_own_help_is_reached_through_serve():
    status, out, _ = await run("serve", "orchestrator", "--help")
    assert status == 0
    assert "--num-draft-tokens" in out


@pytest.mark.slow
async def test_generate_prints_one_json_object_and_speculation_does_not_change_it():
    async with served() as deployment:
        address = f"--address=127.0.0.1:{deployment.orchestrator.port}"
        request = ("generate", "def main(", "--max-tokens=24", "--seed=5", "--json", address)
        drafted, alone, streamed = await asyncio.gather(
            run(*request), run(*request, "--no-speculation"), run(*request[:-2], address)
        )
        [sample] = await deployment.client.generate(text="def main(", max_tokens=24, seed=5)
    answers = []
    for status, out, err in (drafted, alone):
        assert (status, err) == (0, "")
        answers.append(json.loads(out))
        assert out.count("\n") == 1
    for answer in answers:
        assert answer["text"] == sample.text
        assert answer["token_ids"] == sample.token_ids
        assert answer["finish_reason"] == "length"
        assert answer["seed"] == 5
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["usage"]["prompt_tokens"] > 0
        assert {"num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens"} <= answer["speculation"].keys()
    with_draft, without = (answer["speculation"] for answer in answers)
    assert with_draft["num_accepted_tokens"] > 0
    assert with_draft["num_rounds"] < without["num_rounds"] == 24
    assert without["num_drafts"] == 0
    # In a pipe the text comes as it is.
    assert streamed == (0, sample.text + "\n", "")


@pytest.mark.slow
async def test_generate_passes_every_option_on():
    async with served() as deployment:
        request = dict(text="x", max_tokens=8, seed=9, temperature=0.5, top_p=0.9, top_k=50, min_p=0.01)
        [plain] = await deployment.client.generate(**request)
        bias = {plain.token_ids[0]: -100.0, plain.token_ids[-1]: 0.5}
        request |= dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=3)
        [sample] = await deployment.client.generate(**request, logit_bias=bias)
        assert plain.token_ids[0] not in sample.token_ids
        stop = sample.text[len(sample.text) // 2 :][:2]
        [stopped] = await deployment.client.generate(**request, logit_bias=bias, stop=[stop])
        options = [f"--{name.replace('_', '-')}={value}" for name, value in request.items() if name != "text"]
        options += [f"--logit-bias={token}={value}" for token, value in bias.items()]
        status, out, _ = await run(
            *("generate", "x", "--json", f"--address=127.0.0.1:{deployment.orchestrator.port}", *options),
            *(f"--stop={stop}", "--verification=coupled", "--num-draft-tokens=2"),
        )
    assert status == 0
    answer = json.loads(out)
    assert (answer["text"], answer["finish_reason"]) == (stopped.text, "stop")
    assert stopped.text != sample.text


@pytest.mark.slow
async def test_generate_says_what_is_wrong_in_a_sentence_and_exits_with_1():
    [port] = free_ports(1)
    nobody = await run("generate", "x", f"--address=127.0.0.1:{port}", "--timeout-s=5")
    async with served() as deployment:
        address = f"--address=127.0.0.1:{deployment.orchestrator.port}"
        refused = await run("generate", "x", "--top-p=7", "--temperature=-1", address)
    for status, out, err in (nobody, refused):
        assert status == 1
        assert out == ""
        assert err.startswith("specdec: ")
        assert len(err.splitlines()) == 1
    assert "[REPLICA_LOST]" in nobody[2]
    assert "top_p" in refused[2]
    assert "temperature" in refused[2]
    assert "[INVALID_ARGUMENT]" in refused[2]


def test_bad_usage_of_generate_exits_with_2():
    refused = CliRunner().invoke(app, ["generate", "x", "--verification=hope"])
    assert refused.exit_code == 2
    assert "hope" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("target", "--model=x", "--dtype=float7", "--port=-1"), ("--dtype", "--port")),
        (("orchestrator", "--target=nowhere"), ("--target", "not host:port")),
        (
            ("orchestrator", "--target=127.0.0.1:1", "--tokenizer=/no/such"),
            ("/no/such is neither a tokenizer.json, nor a directory with one",),
        ),
        (("conductor",), ("conductor",)),
    ],
    ids=lambda value: value[0] if value[0].isalpha() else "",
)
async def test_serve_with_bad_flags_exits_with_2_and_names_them(arguments, words):
    status, out, err = await run("serve", *arguments)
    assert (status, out) == (2, "")
    for word in words:
        assert word in err


def test_a_model_that_cannot_be_loaded_exits_with_2_and_a_sentence(capsys, monkeypatch):
    def build():
        raise ValueError("no such model")

    monkeypatch.setattr(telemetry, "set_up", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        model_service.run(EngineSettings(), "target", build)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "specdec target: no such model\n"


@pytest.mark.slow
async def test_a_port_in_use_exits_with_1_and_a_sentence():
    async with served() as deployment:
        port = deployment.orchestrator.port
        status, _, err = await run("--target=127.0.0.1:1", f"--port={port}", module="orchestrator")
    assert status == 1
    assert f"specdec orchestrator: cannot listen on 127.0.0.1:{port}" in err


@pytest.mark.slow
async def test_health_says_whether_a_service_serves_by_its_exit_status():
    [port] = free_ports(1)
    async with served() as deployment:
        address = f"127.0.0.1:{deployment.orchestrator.port}"
        serving, alive, unknown, nobody = await asyncio.gather(
            run("health", address),
            run("health", address, "--service=liveness"),
            run("health", address, "--service=no.such"),
            run("health", f"127.0.0.1:{port}"),
        )
    assert serving == alive == (0, "SERVING\n", "")
    assert unknown[:2] == nobody[:2] == (1, "NOT_SERVING\n")
