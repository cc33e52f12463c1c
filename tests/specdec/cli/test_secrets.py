"""Certificates and keys on the command line: made, used by those who call, refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.models.table_model import Table, TableVerifier
from orchestrator.api.api_keys import ApiKeys, read_keys
from specdec.cli.doctor import examine
from specdec.cli.main import app
from specdec.cli.processes import deployment, free_ports
from specdec.security import dev_ca as certificates
from target_service.language_model import LmVerifier
from tests.certificates import caller, files
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.models.table_runner import TableRunner
from tests.specdec.cli.test_main import TOKENIZER, run

TABLE = Table(vocab_size=64, context_length=512)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    certificates.make(directory)
    return directory


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SPECDEC_"):
            monkeypatch.delenv(name)


def test_certificates_are_made_for_everybody(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certificates", str(tmp_path / "pki"), "--days=1", "--name=example.org"])
    assert result.exit_code == 0, result.output
    for owner in ("target", "draft", "orchestrator", "operator"):
        assert sorted(file.name for file in (tmp_path / "pki" / owner).iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    (tmp_path / "pki/ca/tls.key").write_text("no key")
    again = CliRunner().invoke(app, ["certificates", str(tmp_path / "pki")])
    assert again.exit_code == 1
    assert again.stderr.startswith("specdec: ")


@pytest.mark.parametrize("name", ["orchestrator", "Target", "draft.", "operator"])
def test_no_certificate_gets_the_name_of_another_service(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certificates", str(tmp_path / "pki"), f"--name={name}"])
    assert result.exit_code == 1
    assert f"specdec: {name} is the name by which that service is known" in result.stderr
    assert not (tmp_path / "pki").exists()


def test_a_key_is_shown_once_and_its_line_is_for_the_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["key", "alice", "--max-sequences=8", "--tokens-per-minute=60000"])
    assert result.exit_code == 0
    token = result.stderr.strip()
    assert token not in result.stdout
    assert len(token) > 40
    file = tmp_path / "keys.jsonl"
    file.write_text(result.stdout)
    [key] = read_keys(str(file))
    assert (key.name, key.max_sequences, key.tokens_per_minute) == ("alice", 8, 60000)
    assert ApiKeys(str(file)).account(f"Bearer {token}").name == "alice"
    assert CliRunner().invoke(app, ["key", "alice"]).stderr.strip() != token
    assert CliRunner().invoke(app, ["key", "alice", "--max-sequences=0"]).exit_code == 2


@pytest.mark.slow
async def test_generate_and_doctor_with_certificates_and_a_key(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.jsonl"
    result = CliRunner().invoke(app, ["key", "alice"])
    keys.write_text(result.stdout)
    token = result.stderr.strip()
    model = LmVerifier(TableRunner(vocab_size=4096, order=1, seed=1))
    settings = {"tokenizer": TOKENIZER, "api_keys_file": str(keys), "client": {"api_key": token}}
    async with cluster([model], (), made, **settings) as running:
        address = f"127.0.0.1:{running.orchestrator.port}"
        ca = f"--tls-ca={made / 'operator' / 'ca.crt'}"
        request = ("generate", "def", "--max-tokens=4", "--seed=1", f"--address={address}")
        [sample] = await running.client.generate(text="def", max_tokens=4, seed=1)

        status, _, err = await run(*request, ca)
        assert (status, "UNAUTHENTICATED" in err) == (1, True)
        assert await run(*request, ca, environment={"SPECDEC_API_KEY": token}) == (0, sample.text + "\n", "")
        by_variable = {"SPECDEC_API_KEY": token, "SPECDEC_TLS_CA": ca.partition("=")[2]}
        assert await run(*request, environment=by_variable) == (0, sample.text + "\n", "")
        assert (await run(*request, ca, "--tls-name=localhost", environment=by_variable))[0] == 0
        assert (await run(*request, ca, "--tls-name=target", environment=by_variable))[0] == 1
        assert (await run(*request, environment={"SPECDEC_API_KEY": token}))[0] == 1, "in the clear"

        _, found = await examine(address, tls=caller(made, "operator"), api_key=token)
        assert not [each for each in found if each.wrong]
        _, found = await examine(address, tls=caller(made, "operator"))
        assert "it answers UNAUTHENTICATED" in found[0].what
        assert found[0].remedy == "set SPECDEC_API_KEY"
        _, found = await examine(address)
        assert "TLS: it speaks TLS, and this side has no certificates" in found[0].what
        assert "certificates of one CA" in found[0].remedy


async def test_doctor_says_what_is_wrong_with_whose_certificate(made: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path)
    async with cluster([TableVerifier(TABLE)], (), made) as running:
        target = running.orchestrator.targets.replicas[0].address
        _, found = await examine("127.0.0.1:1", targets=[target], tls=caller(tmp_path, "operator"))
        assert f"target {target}: TLS: its certificate is not from a CA that tls_ca names" in [f.what for f in found]
        _, found = await examine("127.0.0.1:1", drafts=[target], tls=caller(made, "operator"))
        assert f"draft {target}: TLS: its certificate is not made out to draft" in [f.what for f in found]


@pytest.mark.slow
async def test_health_over_tls_and_in_words_where_that_fails(made: Path) -> None:
    async with cluster([TableVerifier(TABLE)], (), made, health_port=0) as running:
        target = running.orchestrator.targets.replicas[0].address
        flags = [f"--{name.replace('_', '-')}={file}" for name, file in files(made, "target").items()]
        assert await run("health", target, *flags) == (0, "SERVING\n", "")
        assert await run("health", target, *flags, "--tls-name=target") == (0, "SERVING\n", "")
        status, out, err = await run("health", target, *flags, "--tls-name=draft")
        assert (status, out) == (1, "NOT_SERVING\n")
        assert "its certificate is not made out to draft" in err
        status, _, err = await run("health", target)
        assert (status, "it speaks TLS" in err) == (1, True)
        plain = f"127.0.0.1:{running.orchestrator.health_port}"
        assert await run("health", plain) == (0, "SERVING\n", "")
    status, _, err = await run("health", target, "--tls-cert=x", "--tls-key=y")
    assert (status, "need a CA" in err) == (2, True)


@pytest.mark.slow
async def test_a_service_with_a_bad_file_or_on_an_open_address_does_not_start(made: Path, tmp_path: Path) -> None:
    """Exit status 2, in words, before a model is loaded."""
    keys = tmp_path / "keys.jsonl"
    keys.write_text("{\n")
    another = [f"--{name.replace('_', '-')}={file}" for name, file in files(made, "draft").items()]
    target = ["--target=127.0.0.1:1"]
    model = [f"--model={DEMO / 'target'}"]
    for module, arguments, words in (
        ("target_service", [*model, *another], "target_service: made out to draft"),
        ("orchestrator", [*target, *another], "made out to draft"),
        ("orchestrator", [*target, f"--api-keys-file={keys}"], "line 1: is no JSON object"),
        ("target_service", [*model, "--host=0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        ("orchestrator", [*target, "--host=0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        ("draft_service", [*model, "--host=0.0.0.0"], "0.0.0.0 can be reached from other machines"),
    ):
        status, out, err = await run(*arguments, module=module)
        assert (status, out) == (2, ""), err
        assert words.split(": ")[-1] in err


@pytest.mark.slow
async def test_the_three_processes_speak_tls(made: Path) -> None:
    """The bundled pair, from start to text, as `specdec up --certificates` runs it."""
    target, draft = str(DEMO / "target"), str(DEMO / "draft")
    [port] = free_ports(1)
    async with deployment(target, draft, port, ["--threads=1"], made) as (_, _, orchestrator):
        request = ("generate", "def main(", "--max-tokens=8", "--seed=1", "--json", f"--address={orchestrator.address}")
        status, out, err = await run(*request, f"--tls-ca={made / 'operator' / 'ca.crt'}")
        assert (status, err) == (0, "")
        assert json.loads(out)["usage"]["completion_tokens"] == 8
        assert (await run(*request))[0] == 1
