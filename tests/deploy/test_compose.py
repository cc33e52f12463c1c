"""The compose files are valid, ask for what exists, and agree with the settings and with each other."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from draft_service.__main__ import DraftSettings
from orchestrator.settings import OrchestratorSettings
from target_service.__main__ import TargetSettings
from tests.deploy.compose_file import BASE, FILES, GPU, PAIR, ROOT, MissingVariableError, load, variables

SETTINGS = {"target": TargetSettings, "draft": DraftSettings, "orchestrator": OrchestratorSettings}
DEPLOYMENTS = [
    pytest.param(lambda **more: load(BASE, **more), id="cpu"),
    pytest.param(lambda **more: load(BASE, GPU, **{**PAIR, **more}), id="gpu"),
]


def validate(file):
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )


def example():
    pairs = (
        line.partition("=") for line in (ROOT / ".env.example").read_text().splitlines() if line[:1] not in ("#", "")
    )
    return {name: value for name, _, value in pairs}


def settings_of(service):
    """What a service makes of its environment, without what other programs read in it."""
    names = SETTINGS[service].model_fields
    given = load(BASE)["services"][service]["environment"]
    fields = {name.removeprefix("SPECDEC_").lower(): value for name, value in given.items() if "SPECDEC_" in name}
    return SETTINGS[service](**{name: value for name, value in fields.items() if name in names})


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_compose_file_passes_the_schema(file):
    done = validate(file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_what_compose_makes_of_them_passes_the_schema(deployment, tmp_path):
    file = tmp_path / "merged.yml"
    file.write_text(yaml.safe_dump(deployment()))
    done = validate(file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_schema_is_really_asked(tmp_path):
    file = tmp_path / "wrong.yml"
    wrong = load(BASE)
    wrong["services"]["target"]["helthcheck"] = {}
    file.write_text(yaml.safe_dump(wrong))
    done = validate(file)
    assert done.returncode == 1
    assert "helthcheck" in done.stdout


def test_the_example_names_exactly_the_variables_that_are_used():
    assert set(example()) == set().union(*(variables(file) for file in FILES))


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_example_copied_changes_nothing(deployment):
    assert deployment(**{**example(), **PAIR}) == deployment(**PAIR)


def test_gpus_ask_for_their_models():
    for name in PAIR:
        with pytest.raises(MissingVariableError, match=name):
            load(BASE, GPU, **{**PAIR, name: ""})


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_service_is_one_of_its_settings(service, deployment):
    given = deployment()["services"][service]["environment"]
    assert {name.removeprefix("SPECDEC_").lower() for name in given if name.startswith("SPECDEC_")} <= set(
        SETTINGS[service].model_fields
    )


def test_the_orchestrator_asks_for_the_others_by_their_names():
    orchestrator = settings_of("orchestrator")
    assert orchestrator.target == ["target:50051"]
    assert orchestrator.draft == ["draft:50052"]
    assert {"target", "draft"} <= set(load(BASE)["services"])


@pytest.mark.parametrize("service", SETTINGS)
def test_there_is_time_to_end_in_good_order(service):
    period = load(BASE)["services"][service]["stop_grace_period"]
    settings = settings_of(service)
    assert int(period.removesuffix("s")) >= settings.shutdown_grace_s + 5
    if isinstance(settings, OrchestratorSettings):
        assert settings.shutdown_grace_s >= settings.request_timeout_s, "a redeploy would cut the longest off"


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_no_log_grows_for_ever(deployment):
    for name, given in deployment()["services"].items():
        assert given["logging"]["options"].keys() == {"max-size", "max-file"}, name


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_may_do_nothing_but_serve(service, deployment):
    given = deployment()["services"][service]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["tmpfs"] == ["/tmp"]
    assert "user" not in given
    assert not given.get("privileged")


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_nothing_is_reached_from_other_machines(deployment):
    for service in deployment()["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_can_be_scaled(service, deployment):
    given = deployment()["services"][service]
    assert "container_name" not in given
    assert ("ports" in given) == (service == "orchestrator")


def test_orchestrators_can_be_scaled_over_a_range_of_ports():
    given = load(BASE, ORCHESTRATOR_PORT="50050-50051")
    assert given["services"]["orchestrator"]["ports"] == ["127.0.0.1:50050-50051:50050"]


def test_each_model_has_a_gpu_of_its_own():
    services = load(BASE, GPU, **PAIR)["services"]
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("target", "draft")]
    assert [[(each["driver"], each["device_ids"], each["capabilities"]) for each in those] for those in devices] == [
        [("nvidia", ["0"], ["gpu"])],
        [("nvidia", ["1"], ["gpu"])],
    ]
    chosen = load(BASE, GPU, TARGET_GPU="3", **PAIR)["services"]["target"]
    assert chosen["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["3"]


def test_models_on_gpus_are_those_that_were_named():
    services = load(BASE, GPU, **PAIR)["services"]
    assert services["target"]["environment"]["SPECDEC_MODEL"] == "large"
    assert services["draft"]["environment"]["SPECDEC_MODEL"] == "small"
    assert services["orchestrator"]["environment"]["SPECDEC_TOKENIZER"] == "large"


def test_a_build_for_gpus_does_not_take_the_place_of_the_other():
    cpu, gpu = load(BASE)["services"], load(BASE, GPU, **PAIR)["services"]
    for service in ("target", "draft"):
        assert cpu[service]["build"]["args"]["TORCH_INDEX"] != gpu[service]["build"]["args"]["TORCH_INDEX"]
        assert cpu[service]["image"] != gpu[service]["image"]


def test_traces_go_to_the_collector_where_there_is_one():
    for service in SETTINGS:
        assert load(BASE)["services"][service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
        observed = load(BASE, COMPOSE_PROFILES="observability")["services"]
        endpoint = observed[service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        name = re.fullmatch(r"http://(\w+):4317", endpoint)[1]
        assert observed[name]["profiles"] == ["observability"]


def test_what_observes_is_there_only_with_its_profile():
    services = load(BASE)["services"]
    assert {name for name, service in services.items() if "profiles" not in service} == set(SETTINGS)


def test_every_volume_is_declared_and_every_mounted_file_is_there():
    for given in (load(BASE), load(BASE, GPU, **PAIR)):
        for service in given["services"].values():
            for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
                if not source.startswith("."):
                    assert source in given["volumes"]
                elif (ROOT / "deploy/observability").exists() or "observability" not in source:
                    assert (ROOT / source).exists(), source
