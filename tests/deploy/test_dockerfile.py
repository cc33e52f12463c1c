"""The images agree with the compose file, with the settings, and with what the build is given."""

from __future__ import annotations

import re

import pytest

from tests.deploy.compose_file import BASE, ROOT, load
from tests.deploy.dockerfile import FILE, arguments, stages

PORTS = {"orchestrator": "50050", "target": "50051", "draft": "50052", "gateway": "8000"}
each_service = pytest.mark.parametrize("service", PORTS)


@each_service
def test_each_service_is_a_target_of_the_build(service):
    given = load(BASE)["services"][service]
    assert given["build"]["target"] == service
    assert given["image"] == f"specdec-{service}:dev"
    assert ROOT / given["build"]["dockerfile"] == FILE
    assert set(given["build"]["args"]) <= arguments()
    stage = stages()[service]
    assert stage.said("ENTRYPOINT")[-1] == '["specdec"]'
    assert stage.said("CMD")[-1] == f'["serve", "{service}"]'


@each_service
def test_ports_are_the_same_everywhere(service):
    port, stage, given = PORTS[service], stages()[service], load(BASE)["services"]
    assert stage.environment["SPECDEC_PORT"] == port
    assert stage.said("EXPOSE") == [port]
    assert "SPECDEC_PORT" not in given[service]["environment"], "the image has set it"
    if service in ("orchestrator", "gateway"):
        assert given[service]["ports"] == [f"127.0.0.1:{port}:{port}"]
    else:
        assert port in given[service]["expose"]
        assert given["orchestrator"]["environment"][f"SPECDEC_{service.upper()}"] == f"{service}:{port}"
    assert given[service]["environment"]["SPECDEC_METRICS_PORT"] == "9464"
    assert "9464" in given[service]["expose"]


@each_service
def test_an_image_runs_as_a_user_that_is_not_root_and_says_so_by_number(service):
    user, _, group = stages()[service].said("USER")[-1].partition(":")
    assert (user, group) == ("10001", "10001")


@each_service
def test_health_is_asked_by_our_own_probe_at_the_port_that_answers_it(service):
    stage = stages()[service]
    # They ask where the environment says; tests/contract/test_own_health.py and tests/gateway/test_probe.py do so.
    probe = '["python3", "-m", "gateway.probe"]' if service == "gateway" else '["specdec", "health"]'
    assert probe in stage.said("HEALTHCHECK")[-1]
    assert {"SPECDEC_HOST", "SPECDEC_PORT"} <= stage.environment.keys()
    assert "healthcheck" not in load(BASE)["services"][service]


def test_an_engine_is_an_extra_of_the_project_and_vllm_finds_a_compiler_in_its_image():
    [choice] = [line for line in stages()["model-packages"].said("RUN") if "ENGINE" in line]
    extras = set(re.findall(r"'\.\[([\w,]+)\]'", choice))
    assert extras == {"vllm,otlp", "models,otlp"}
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in ("vllm", "models", "otlp"))
    assert "PIP_CONSTRAINT pip install '.[vllm" in choice, "vLLM names versions of its own"
    assert any("gcc" in line and "ENGINE" in line for line in stages()["model-service"].said("RUN"))
    assert stages()["target"].environment["HOME"] == "/tmp", "the only place that can be written"


def test_the_orchestrator_has_no_torch():
    assert stages()["target"].copied[0] == stages()["draft"].copied[0] == ("model-packages", "/opt/venv")
    assert stages()["orchestrator"].copied[0] == ("packages", "/opt/venv")
    installs = stages()["packages"].said("RUN")
    assert not any("torch" in line or "models" in line for line in installs)


@each_service
def test_no_image_is_made_from_the_stage_that_builds(service):
    stage = stages()[service]
    while stage.parent:
        stage = stage.parent
    assert stage.name == "service"


@each_service
def test_the_bundled_model_that_compose_names_is_in_the_image(service):
    given = load(BASE)["services"][service]["environment"]
    if service == "gateway":  # which has none
        assert stages()[service].copied == [("packages", "/opt/venv"), ("code", "/app")]
        return
    path = given.get("SPECDEC_MODEL") or given["SPECDEC_TOKENIZER"]
    assert any(source in (path, f"{path}/tokenizer.json") for _, source in stages()[service].copied)


def test_versions_are_those_of_the_constraints():
    assert stages()["packages"].environment["PIP_CONSTRAINT"].endswith("/constraints.txt")
    assert not re.search(r"[=<>]=\s*\d", " ".join(line for stage in stages().values() for line in stage.said("RUN")))


def test_exactly_what_is_copied_is_sent_to_the_build():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = {source for stage in stages().values() for origin, source in stage.copied if not origin}
    used = copied | set(re.findall(r"type=bind,source=([^,]+)", FILE.read_text()))
    assert "*" in ignore
    for source in used:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in sent), source
    for each in sent:
        assert any(source == each or source.startswith(f"{each}/") for source in used), each


def test_every_package_of_the_project_is_in_the_images():
    code = {source for _, source in stages()["code"].copied}
    pattern = re.search(r"\[tool.setuptools.packages.find\]\ninclude = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert {name.strip(' "*') for name in pattern[1].split(",")} <= code
