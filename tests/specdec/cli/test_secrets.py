"""Certificates and keys on the command line: made, used by callers, refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.api.api_keys import ApiKeys, read_keys
from specdec.cli.doctor import examine
from specdec.security import dev_ca
from target_service.language_model import LmVerifier
from testing.certificates import caller, files
from testing.table_model import Table, TableVerifier
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.models.table_runner import TableRunner
from tests.specdec.cli.commands import called, invoke, program


@pytest.fixture(scope="module")
def certificate_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    dev_ca.make(directory)
    return directory


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SPECDEC_"):
            monkeypatch.delenv(name)


def flags_of(directory: Path, owner: str) -> list[str]:
    return [f"--{name.replace('_', '-')}={file}" for name, file in files(directory, owner).items()]


def test_certificates_are_made_for_every_service_and_the_operator(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    status, _, err = invoke("certificates", str(pki), "--days=1", "--name=example.org")
    assert (status, err) == (0, "")
    for owner in ("target", "draft", "orchestrator", "operator"):
        assert sorted(file.name for file in (pki / owner).iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    (pki / "ca/tls.key").write_text("no key")
    status, _, err = invoke("certificates", str(pki))
    assert (status, err.startswith("specdec: ")) == (1, True)


@pytest.mark.parametrize("name", ["orchestrator", "Target", "draft.", "operator"])
def test_no_certificate_gets_the_name_of_another_service(name: str, tmp_path: Path) -> None:
    status, _, err = invoke("certificates", str(tmp_path / "pki"), f"--name={name}")
    assert (status, (tmp_path / "pki").exists()) == (1, False)
    assert f"specdec: {name} is the name by which that service is known" in err


def test_a_key_is_shown_once_and_its_line_is_for_the_file(tmp_path: Path) -> None:
    status, line, token = invoke("key", "alice", "--max-sequences=8", "--tokens-per-minute=60000")
    token = token.strip()
    assert status == 0
    assert token not in line
    assert len(token) > 40
    file = tmp_path / "keys.jsonl"
    file.write_text(line)
    [key] = read_keys(str(file))
    assert (key.name, key.max_sequences, key.tokens_per_minute) == ("alice", 8, 60000)
    assert ApiKeys(str(file)).account(f"Bearer {token}").name == "alice"
    assert (key.shared, key.operator) == (False, False)
    file.write_text(invoke("key", "bob", "--shared")[1])
    assert read_keys(str(file))[0].shared
    file.write_text(invoke("key", "carol", "--operator")[1])
    assert read_keys(str(file))[0].operator
    assert invoke("key", "alice")[2].strip() != token
    assert invoke("key", "alice", "--max-sequences=0")[0] == 2


async def test_generate_and_doctor_with_certificates_and_a_key(certificate_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    _, line, token = await called("key", "alice", "--operator")
    keys.write_text(line)
    token = token.strip()
    model = LmVerifier(TableRunner(vocab_size=4096, order=1, seed=1))
    settings = {"tokenizer": str(DEMO / "target"), "api_keys_file": str(keys), "client": {"api_key": token}}
    async with cluster([model], (), certificate_dir, **settings) as running:
        address = f"127.0.0.1:{running.orchestrator.port}"
        file = str(certificate_dir / "operator" / "ca.crt")
        request, ca = ("generate", "def", "--max-tokens=4", "--seed=1", f"--address={address}"), f"--tls-ca={file}"
        [sample] = await running.client.generate(text="def", max_tokens=4, seed=1)

        status, _, err = await called(*request, ca)
        assert (status, "UNAUTHENTICATED" in err) == (1, True)
        by_variable = {"SPECDEC_API_KEY": token, "SPECDEC_TLS_CA": file}
        assert await called(*request, ca, SPECDEC_API_KEY=token) == (0, sample.text + "\n", "")
        assert await called(*request, **by_variable) == (0, sample.text + "\n", "")
        assert (await called(*request, "--tls-name=localhost", **by_variable))[0] == 0
        assert (await called(*request, "--tls-name=target", **by_variable))[0] == 1
        assert (await called(*request, SPECDEC_API_KEY=token))[0] == 1, "in the clear"

        _, findings = await examine(address, tls=caller(certificate_dir, "operator"), api_key=token)
        assert not [item for item in findings if item.wrong]
        _, findings = await examine(address, tls=caller(certificate_dir, "operator"))
        assert "it answers UNAUTHENTICATED" in findings[0].what
        assert findings[0].remedy == "set SPECDEC_API_KEY"
        _, findings = await examine(address)
        assert "TLS: it speaks TLS, and this side has no certificates" in findings[0].what
        assert "certificates of one CA" in findings[0].remedy


def test_a_service_with_a_bad_file_does_not_start(certificate_dir: Path, tmp_path: Path) -> None:
    """Exit status 2, in words, before a model is loaded: there is none."""
    (tmp_path / "keys.jsonl").write_text("{\n")
    target, front = ("target_service", "--model=/no/such"), ("orchestrator", "--target=127.0.0.1:1")
    for service, flags, words in (
        (target, flags_of(certificate_dir, "draft"), "issued for draft"),
        (front, flags_of(certificate_dir, "draft"), "issued for draft"),
        (front, [f"--api-keys-file={tmp_path / 'keys.jsonl'}"], "line 1: is no JSON object"),
    ):
        status, out, err = program(*service, *flags)
        assert (status, out, words in err) == (2, "", True)


async def test_health_and_doctor_over_tls_and_in_words_where_that_fails(certificate_dir: Path, tmp_path: Path) -> None:
    dev_ca.make(tmp_path)
    target_flags, problem = flags_of(certificate_dir, "target"), "its certificate is not issued for draft"
    async with cluster([TableVerifier(Table())], (), certificate_dir, health_port=0) as running:
        target = running.orchestrator.targets.replicas[0].address
        for flags in (target_flags, [*target_flags, "--tls-name=target"]):
            assert await called("health", target, *flags) == (0, "SERVING\n", "")
        status, out, err = await called("health", target, *target_flags, "--tls-name=draft")
        assert (status, out, problem in err) == (1, "NOT_SERVING\n", True)
        status, _, err = await called("health", target)
        assert (status, "it speaks TLS" in err) == (1, True)
        plain = f"127.0.0.1:{running.orchestrator.health_port}"
        assert await called("health", plain) == (0, "SERVING\n", "")

        _, findings = await examine("127.0.0.1:1", targets=[target], tls=caller(tmp_path, "operator"))
        assert f"target {target}: TLS: its certificate is not from a CA that tls_ca names" in [f.what for f in findings]
        _, findings = await examine("127.0.0.1:1", drafts=[target], tls=caller(certificate_dir, "operator"))
        assert f"draft {target}: TLS: {problem}" in [f.what for f in findings]
    status, _, err = await called("health", target, "--tls-cert=x", "--tls-key=y")
    assert (status, "need a CA" in err) == (2, True)
