"""Flags over environment over defaults, and every bad value named at once."""

from __future__ import annotations

import os

import pytest

from specdec.core.settings import ModelServiceSettings, parse


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
    assert (settings.model, settings.host, settings.port) == ("m", "127.0.0.1", 0)
    assert (settings.device, settings.dtype, settings.threads, settings.kv_slots) == ("cpu", "auto", 0, 0)
    assert not settings.reflection


def test_flags_have_hyphens_and_take_an_equals_sign_or_a_space_and_switches_have_a_no():
    for flags in (
        ("--model=m", "--kv-slots=100", "--reflection"),
        ("--model", "m", "--kv-slots", "100", "--reflection"),
    ):
        assert (read(*flags).kv_slots, read(*flags).reflection) == (100, True)
    assert not read("--model=m", "--no-reflection").reflection


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "::", "model-host", "localhost.example"])
def test_without_tls_a_service_listens_on_loopback_alone_unless_it_is_insecure(host, capsys, tmp_path):
    said = refused(capsys, "--model=m", f"--host={host}")
    bare = host.strip("[]")
    assert f"--insecure: Value error, {bare} can be reached from other machines" in said
    assert read("--model=m", f"--host={host}", "--insecure").host == bare
    file = tmp_path / "pem"
    file.write_text("")
    assert read("--model=m", f"--host={host}", *(f"--tls-{name}={file}" for name in ("cert", "key", "ca"))).host == bare


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "localhost", "::1", "[::1]"])
def test_loopback_may_be_insecure_and_an_ipv6_address_is_shown_in_brackets(host):
    settings = read("--model=m", f"--host={host}")
    assert not settings.insecure
    assert settings.address(5) == ("[::1]:5" if "::1" in host else f"{host}:5")


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


def test_flags_go_over_the_environment_and_settings_of_other_services_do_no_harm(monkeypatch):
    environment = dict(MODEL="m", KV_SLOTS="77", SHUTDOWN_GRACE_S="0.5", DTYPE="bfloat16")
    for name, value in (environment | dict(TARGET="a:1", NUM_DRAFT_TOKENS="-5")).items():
        monkeypatch.setenv(f"SPECDEC_{name}", value)
    settings = read()
    assert (settings.model, settings.kv_slots, settings.shutdown_grace_s, settings.dtype) == ("m", 77, 0.5, "bfloat16")
    settings = read("--model", "of the flag")
    assert (settings.model, settings.dtype) == ("of the flag", "bfloat16")


def test_settings_of_vllm_may_be_variables_and_are_refused_with_another_engine_unless_they_say_nothing(
    capsys, monkeypatch
):
    monkeypatch.setenv("SPECDEC_VLLM__TENSOR_PARALLEL_SIZE", "1")
    assert read("--model=m").engine == "torch"
    monkeypatch.setenv("SPECDEC_VLLM__TENSOR_PARALLEL_SIZE", "2")
    assert "--vllm: Value error, only engine vllm has tensor_parallel_size" in refused(capsys, "--model=m")
    monkeypatch.setenv("SPECDEC_ENGINE", "vllm")
    settings = read("--model=m", "--vllm.max-num-seqs=5")
    assert "enforce_eager" not in settings.vllm.model_fields_set, "which would not leave it to the device"
    parsed = [read("--model=m", flag).vllm for flag in ("--vllm.enforce-eager", "--no-vllm.enforce-eager")]
    assert [options.enforce_eager for options in parsed if "enforce_eager" in options.model_fields_set] == [True, False]
    assert read("--model=m", '--vllm.args={"a": {"b": [1]}}').vllm.args == {"a": {"b": [1]}}
    assert read("--model=m", '--vllm.adapters={"sql": "/adapters/sql"}').vllm.adapters == {"sql": "/adapters/sql"}
    assert (settings.engine, settings.vllm.tensor_parallel_size, settings.vllm.max_num_seqs) == ("vllm", 2, 5)
    assert "only engine vllm" in refused(capsys, "--model=m", "--engine=torch")


BAD = {
    "--port": ("-1", "65536", "x"),
    "--kv-slots": ("-1", "1e9", "many"),
    "--memory-fraction": ("0", "1.1", "half"),
    "--threads": ("-1", "999999999999"),
    "--dtype": ("float64", ""),
    "--log-level": ("LOUD", "1"),
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


def test_a_log_level_is_taken_in_any_case():
    assert read("--model=m", "--log-level=debug").log_level == "DEBUG"


def test_an_unknown_flag_and_a_missing_one_are_refused_by_name(capsys):
    assert "--no-such-flag" in refused(capsys, "--model=m", "--no-such-flag=1")
    assert "target_service: --model:" in refused(capsys)
    assert "target_service: --model:" in refused(capsys, "--model=")


def test_help_names_every_setting_with_a_description(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for name, field in ModelServiceSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in said
        assert field.description
