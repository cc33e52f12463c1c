"""Flags over environment over defaults, and every bad value named at once."""

from __future__ import annotations

import os

import pytest

from specdec.core.settings import ModelServiceSettings, ServiceSettings, parse


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in os.environ:
        if name.upper().startswith("SPECDEC_"):
            monkeypatch.delenv(name)


def read(*arguments: str) -> ModelServiceSettings:
    return parse(ModelServiceSettings, arguments, "target_service")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        read(*arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_defaults_are_for_one_machine():
    settings = read("--model", "m")
    assert settings.model == "m"
    assert (settings.host, settings.port) == ("127.0.0.1", 0)
    assert (settings.device, settings.dtype, settings.threads, settings.kv_slots) == ("cpu", "auto", 0, 0)


def test_flags_are_spelt_with_hyphens_and_take_an_equals_sign_or_a_space():
    assert read("--model=m", "--kv-slots=100").kv_slots == 100
    assert read("--model", "m", "--kv-slots", "100").kv_slots == 100


def test_a_switch_has_a_no():
    assert read("--model=m", "--reflection").reflection
    assert not read("--model=m", "--no-reflection").reflection


def test_reflection_is_off_unless_asked_for():
    assert not read("--model=m").reflection


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "::", "model-host", "localhost.example"])
def test_without_tls_a_service_listens_on_loopback_alone_unless_told(host, capsys, tmp_path):
    said = refused(capsys, "--model=m", f"--host={host}")
    bare = host.strip("[]")
    assert f"--insecure: Value error, {bare} can be reached from other machines" in said
    assert read("--model=m", f"--host={host}", "--insecure").host == bare
    file = tmp_path / "pem"
    file.write_text("")
    assert read("--model=m", f"--host={host}", *(f"--tls-{name}={file}" for name in ("cert", "key", "ca"))).host == bare


@pytest.mark.parametrize(
    ("host", "address"), [("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("127.0.0.1", "127.0.0.1:5"), ("a.b", "a.b:5")]
)
def test_an_address_of_ipv6_is_told_in_brackets_however_it_was_given(host, address):
    assert read("--model=m", f"--host={host}", "--insecure").address(5) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_leave(host):
    assert not read("--model=m", f"--host={host}").insecure


def test_tls_needs_all_three_files_and_they_must_be_there(capsys, tmp_path):
    file = tmp_path / "pem"
    file.write_text("")
    assert "not set: tls_ca, tls_key" in refused(capsys, "--model=m", f"--tls-cert={file}")
    assert "not set: tls_cert" in refused(capsys, "--model=m", f"--tls-ca={file}", f"--tls-key={file}")
    assert "not set: tls_ca" in refused(capsys, "--model=m", f"--tls-cert={file}", f"--tls-key={file}")
    said = refused(capsys, "--model=m", "--tls-cert=a", "--tls-key=b", "--host=10.0.0.1")
    assert "--tls-cert: Value error, there is no file a" in said
    assert "--tls-key: Value error, there is no file b" in said
    assert "not set: tls_ca" in said
    assert "--insecure" not in said, "TLS is meant"


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("SPECDEC_MODEL", "m")
    monkeypatch.setenv("SPECDEC_KV_SLOTS", "77")
    monkeypatch.setenv("SPECDEC_SHUTDOWN_GRACE_S", "0.5")
    settings = read()
    assert (settings.model, settings.kv_slots, settings.shutdown_grace_s) == ("m", 77, 0.5)


def test_a_flag_goes_over_the_environment(monkeypatch):
    monkeypatch.setenv("SPECDEC_MODEL", "of the environment")
    monkeypatch.setenv("SPECDEC_DTYPE", "bfloat16")
    settings = read("--model", "of the flag")
    assert (settings.model, settings.dtype) == ("of the flag", "bfloat16")


def test_settings_of_other_services_in_the_environment_do_no_harm(monkeypatch):
    monkeypatch.setenv("SPECDEC_TARGET", "a:1")
    monkeypatch.setenv("SPECDEC_NUM_DRAFT_TOKENS", "-5")
    assert read("--model", "m").model == "m"


def test_what_is_required_is_asked_for_by_name(capsys):
    assert "target_service: --model:" in refused(capsys)


BAD = {
    "--port": ("-1", "65536", "x"),
    "--kv-slots": ("-1", "1e9", "many"),
    "--memory-fraction": ("0", "1.1", "half"),
    "--threads": ("-1",),
    "--dtype": ("float64", ""),
    "--log-level": ("LOUD", "info"),
    "--shutdown-grace-s": ("-1", "soon"),
    "--reflection": ("perhaps",),
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(flag, value, capsys):
    said = refused(capsys, "--model=m", f"{flag}={value}")
    assert flag in said


@pytest.mark.parametrize("from_environment", [False, True])
def test_all_bad_values_are_named_at_once(from_environment, capsys, monkeypatch):
    bad = {flag: values[0] for flag, values in BAD.items()}
    if from_environment:
        for flag, value in bad.items():
            monkeypatch.setenv("SPECDEC_" + flag.removeprefix("--").replace("-", "_").upper(), value)
        said = refused(capsys)
    else:
        del bad["--reflection"]  # an argument to a switch: argparse itself refuses that
        said = refused(capsys, *(f"{flag}={value}" for flag, value in bad.items()))
    for flag in (*bad, "--model"):
        assert f"{flag}:" in said
    assert len(said.splitlines()) == len(bad) + 1


def test_an_unknown_flag_is_refused(capsys):
    assert "--no-such-flag" in refused(capsys, "--model=m", "--no-such-flag=1")


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for name in ModelServiceSettings.model_fields:
        assert "--" + name.replace("_", "-") in said


@pytest.mark.parametrize("cls", [ServiceSettings, ModelServiceSettings])
def test_every_setting_says_what_it_is(cls):
    assert all(field.description for field in cls.model_fields.values())
