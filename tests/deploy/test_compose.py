"""The compose files are valid, ask for what exists, and agree with the settings and with each other."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from draft_service.__main__ import DraftSettings
from gateway.settings import GatewaySettings
from orchestrator.settings import OrchestratorSettings
from target_service.__main__ import TargetSettings
from tests.deploy.compose_file import BASE, FILES, GPU, PAIR, ROOT, MissingVariableError, load, variables

SETTINGS = {
    **{"target": TargetSettings, "draft": DraftSettings, "orchestrator": OrchestratorSettings},
    "gateway": GatewaySettings,
}
DEPLOYMENTS = {
    "cpu": lambda **more: load(BASE, **more),
    "gpu": lambda **more: load(BASE, GPU, **{**PAIR, **more}),
}
each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
each_service = pytest.mark.parametrize("service", SETTINGS)


def validate(*files):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def example():
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line[:1] not in ("#", ""))
    return {name: value for name, _, value in pairs}


def settings_of(service):
    """What a service makes of its environment, without what other programs read in it."""
    names = SETTINGS[service].model_fields
    given = load(BASE)["services"][service]["environment"]
    fields = {name.removeprefix("SPECDEC_").lower(): value for name, value in given.items() if "SPECDEC_" in name}
    return SETTINGS[service](**{name: value for name, value in fields.items() if name in names})


@pytest.mark.slow
def test_every_compose_file_and_what_compose_makes_of_them_passes_the_schema(tmp_path):
    merged = []
    for name, deployment in DEPLOYMENTS.items():
        merged.append(tmp_path / f"{name}.yml")
        merged[-1].write_text(yaml.safe_dump(deployment()))
    done = validate(*FILES, *merged)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = load(BASE)
    wrong["services"]["target"]["helthcheck"] = {}
    merged[0].write_text(yaml.safe_dump(wrong))
    done = validate(merged[0])
    assert done.returncode == 1
    assert "helthcheck" in done.stdout


@each_deployment
def test_the_example_names_the_variables_that_are_used_with_their_defaults(deployment):
    assert set(example()) == set().union(*(variables(file) for file in FILES))
    assert deployment(**{**example(), **PAIR}) == deployment(**PAIR)


def test_gpus_ask_for_their_models():
    for name in PAIR:
        with pytest.raises(MissingVariableError, match=name):
            load(BASE, GPU, **{**PAIR, name: ""})
    services = load(BASE, GPU, **PAIR)["services"]
    assert services["target"]["environment"]["SPECDEC_MODEL"] == "large"
    assert services["draft"]["environment"]["SPECDEC_MODEL"] == "small"
    assert services["orchestrator"]["environment"]["SPECDEC_TOKENIZER"] == "large"


@pytest.mark.parametrize(("role", "settings"), [("target", TargetSettings), ("draft", DraftSettings)])
def test_a_model_on_several_gpus_has_the_image_the_engine_and_the_devices_for_it(role, settings, monkeypatch):
    names = {f"{role.upper()}_{name}": value for name, value in (("ENGINE", "vllm"), ("TENSOR_PARALLEL", "2"))}
    services = load(BASE, GPU, **PAIR, **names, **{f"{role.upper()}_GPU": "2,3"})["services"]
    service, [other] = services[role], [services[other] for other in ("target", "draft") if other != role]
    assert (service["build"]["args"]["ENGINE"], other["build"]["args"]["ENGINE"]) == ("vllm", "torch")
    assert service["image"] != load(BASE, GPU, **PAIR)["services"][role]["image"]
    for name in ("SPECDEC_MODEL", "SPECDEC_ENGINE", "SPECDEC_VLLM__TENSOR_PARALLEL_SIZE"):
        monkeypatch.setenv(name, service["environment"][name])
    read = settings()
    assert (read.engine, read.vllm.tensor_parallel_size) == ("vllm", 2)
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["2,3"], "which the runtime joins with commas itself"
    assert "shm_size" in service, "through which processes of several GPUs speak"


def test_a_target_may_have_a_head():
    heads = [
        load(BASE, GPU, **PAIR, TARGET_HEAD=head)["services"]["target"]["environment"] for head in ("", "/models/head")
    ]
    assert [each["SPECDEC_HEAD"] for each in heads] == ["", "/models/head"]


@each_deployment
@each_service
def test_every_variable_of_a_service_is_one_of_its_settings(service, deployment):
    given = deployment()["services"][service]["environment"]
    ours = {name.removeprefix("SPECDEC_").lower().split("__")[0] for name in given if name.startswith("SPECDEC_")}
    assert ours <= set(SETTINGS[service].model_fields)


def test_the_orchestrator_knows_the_others_by_their_names_and_may_have_a_range_of_ports():
    given = load(BASE, ORCHESTRATOR_PORT="50050-50051")
    assert given["services"]["orchestrator"]["ports"] == ["127.0.0.1:50050-50051:50050"]
    orchestrator = settings_of("orchestrator")
    assert (orchestrator.target, orchestrator.draft) == (["target:50051"], ["draft:50052"])
    assert {"target", "draft"} <= set(load(BASE)["services"])


@each_service
def test_there_is_time_to_end_in_good_order(service):
    period = load(BASE)["services"][service]["stop_grace_period"]
    settings = settings_of(service)
    assert int(period.removesuffix("s")) >= settings.shutdown_grace_s + 5
    if isinstance(settings, OrchestratorSettings):
        assert settings.shutdown_grace_s >= settings.request_timeout_s, "a redeploy would cut the longest off"


@each_deployment
def test_the_service_that_clients_reach_can_write_nothing_that_others_read(deployment):
    services = deployment()["services"]
    used = {name: [volume.split(":") for volume in services[name].get("volumes", [])] for name in SETTINGS}
    written = {source for source, _, *how in used.pop("orchestrator") if "ro" not in how}
    assert not written & {source for volumes in used.values() for source, *_ in volumes}


@each_deployment
@each_service
def test_a_service_may_do_nothing_but_serve_and_can_be_scaled(service, deployment):
    given = deployment()["services"][service]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["tmpfs"] == ["/tmp"]
    assert not given.get("privileged")
    assert not {"user", "container_name"} & given.keys()
    assert ("ports" in given) == (service in ("orchestrator", "gateway"))


@each_deployment
def test_no_log_grows_without_limit_and_no_port_is_reached_from_other_machines(deployment):
    for name, given in deployment()["services"].items():
        assert given["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert all(port.startswith("127.0.0.1:") for port in given.get("ports", [])), name


def test_each_model_has_a_gpu_of_its_own():
    def devices(service, **more):
        given = load(BASE, GPU, **PAIR, **more)["services"][service]["deploy"]["resources"]["reservations"]["devices"]
        return [(each["driver"], each["device_ids"], each["capabilities"]) for each in given]

    assert devices("target") == [("nvidia", ["0"], ["gpu"])]
    assert devices("draft") == [("nvidia", ["1"], ["gpu"])]
    assert devices("target", TARGET_GPU="3") == [("nvidia", ["3"], ["gpu"])]


def test_a_build_for_gpus_does_not_take_the_place_of_the_other():
    cpu, gpu = load(BASE)["services"], load(BASE, GPU, **PAIR)["services"]
    for service in ("target", "draft"):
        assert cpu[service]["build"]["args"]["TORCH_INDEX"] != gpu[service]["build"]["args"]["TORCH_INDEX"]
        assert cpu[service]["image"] != gpu[service]["image"]


@each_service
def test_only_with_its_profile_is_there_a_collector_and_traces_go_to_it(service):
    plain = load(BASE)["services"]
    assert {name for name, given in plain.items() if "profiles" not in given} == set(SETTINGS)
    assert plain[service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
    observed = load(BASE, COMPOSE_PROFILES="observability")["services"]
    endpoint = observed[service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    name = re.fullmatch(r"http://(\w+):4317", endpoint)[1]
    assert observed[name]["profiles"] == ["observability"]


@each_deployment
def test_every_volume_is_declared_and_every_mounted_file_exists(deployment):
    given = deployment()
    for service in given["services"].values():
        for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
            if not source.startswith("."):
                assert source in given["volumes"]
            elif (ROOT / "deploy/observability").exists() or "observability" not in source:
                assert (ROOT / source).exists(), source
