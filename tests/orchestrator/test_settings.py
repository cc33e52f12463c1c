"""Settings as operators write them."""

from __future__ import annotations

import pytest

from orchestrator.settings import OrchestratorSettings
from specdec.core.sequence import Method
from specdec.core.settings import parse


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("SPECDEC_TARGET", "SPECDEC_DRAFT", "SPECDEC_TOKENIZER", "SPECDEC_METHODS"):
        monkeypatch.delenv(name, raising=False)


def read(*arguments: str) -> OrchestratorSettings:
    return parse(OrchestratorSettings, arguments, "orchestrator")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--target", "a:1,b:2"),
        ("--target=a:1, b:2",),
        ("--target", "a:1", "--target", "b:2"),
        ("--target", "a:1,b:2,"),
    ],
)
def test_several_addresses_by_commas_or_by_repeating_the_flag(arguments):
    assert read(*arguments).target == ["a:1", "b:2"]


def test_addresses_from_the_environment_and_flags_over_them(monkeypatch):
    monkeypatch.setenv("SPECDEC_TARGET", "a:1,b:2")
    monkeypatch.setenv("SPECDEC_DRAFT", "c:3")
    assert read().target == ["a:1", "b:2"]
    assert read().draft == ["c:3"]
    assert read("--target", "d:4").target == ["d:4"]


def test_without_a_draft_there_is_none():
    assert read("--target", "a:1").draft == []


def test_an_ipv6_address_is_an_address():
    assert read("--target", "[::1]:50051").target == ["[::1]:50051"]


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "a:1 b:2"])
def test_what_is_no_address_is_refused_with_its_name(address, capsys):
    with pytest.raises(SystemExit) as caught:
        read("--target", f"ok:1,{address}")
    assert caught.value.code == 2
    assert f"'{address}' is not host:port" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--target", ""), ("--target", " , ")])
def test_at_least_one_target_is_required(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        read(*arguments)
    assert caught.value.code == 2
    assert "--target" in capsys.readouterr().err


def test_methods_are_all_unless_an_operator_names_some(monkeypatch):
    assert read("--target", "a:1").methods == list(Method)
    assert read("--target", "a:1", "--methods", "coupled, block").methods == [Method.COUPLED, Method.BLOCK]
    monkeypatch.setenv("SPECDEC_METHODS", "coupled")
    assert read("--target", "a:1").methods == [Method.COUPLED]


@pytest.mark.parametrize(("methods", "said"), [("coupled,best", "'token'"), ("block", "coupled"), ("", "coupled")])
def test_methods_that_do_not_exist_or_lack_the_default_are_refused(methods, said, capsys):
    with pytest.raises(SystemExit) as caught:
        read("--target", "a:1", "--methods", methods)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--methods" in error
    assert said in error


def test_all_bad_values_are_named_at_once(capsys):
    with pytest.raises(SystemExit):
        read("--target", "a", "--draft", "b", "--num-draft-tokens", "-1", "--watchdog-s", "0", "--port", "70000")
    said = capsys.readouterr().err
    for flag in ("--target", "--draft", "--num-draft-tokens", "--watchdog-s", "--port"):
        assert flag in said


@pytest.mark.parametrize("flag", ["--max-sequences", "--hung-pass-s"])
def test_what_only_a_model_service_has_is_refused(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        read("--target", "a:1", f"{flag}=5")
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


def test_too_few_characters_of_a_digest_are_refused(capsys):
    assert read("--target=a:1", "--model-digest=0123456789ab").model_digest == "0123456789ab"
    with pytest.raises(SystemExit) as caught:
        read("--target=a:1", "--model-digest=0123")
    assert caught.value.code == 2
    assert "--model-digest: Value error, at least 12 characters" in capsys.readouterr().err
