"""The examples for KServe and the workflows are valid as far as that can be known here, and agree with the services."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml

from specdec.bridges.vllm import BridgeSettings, RemoteDraft
from tests.checkout import ROOT
from tests.deploy.manifests import Manifest, environment
from tests.deploy.test_manifests import SETTINGS, VERSIONS

KSERVE = ROOT / "deploy" / "kserve"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def documents(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((KSERVE / name).read_text()))


def check_pod(spec: dict[str, Any]) -> None:
    for version in VERSIONS:
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_runtime_is_a_pod_whose_services_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, service = documents("serving-runtime.yaml")
    [format] = runtime["spec"]["supportedModelFormats"]
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] == format["name"]
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    check_pod({name: runtime["spec"][name] for name in ("containers", "volumes")})
    read = {}
    for container in runtime["spec"]["containers"]:
        role = container["command"][-1]
        assert container["image"] == f"specdec-{role}:dev"
        assert container["name"] == ("kserve-container" if role == "orchestrator" else role)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        with monkeypatch.context() as patched:
            for name, value in environment(container).items():
                patched.setenv(name, value)
            read[role] = SETTINGS[role]()
    orchestrator = read["orchestrator"]
    assert (orchestrator.target, orchestrator.draft) == (
        [f"127.0.0.1:{read['target'].port}"],
        [f"127.0.0.1:{read['draft'].port}"],
    )
    main = runtime["spec"]["containers"][0]
    assert main["ports"] == [{"containerPort": orchestrator.http_port, "protocol": "TCP"}]


def test_the_llm_service_loads_our_proposer_and_may_call_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    service, policy = documents("llm-inference-service.yaml")
    check_pod(service["spec"]["template"])
    [container] = service["spec"]["template"]["containers"]
    set_ = environment(container)
    flag, config = shlex.split(set_["VLLM_ADDITIONAL_ARGS"])
    assert flag == "--speculative-config"
    assert json.loads(config)["model"] == f"{RemoteDraft.__module__}.{RemoteDraft.__name__}"
    monkeypatch.setenv("SPECDEC_DRAFT", set_["SPECDEC_DRAFT"])
    assert BridgeSettings().draft == ["draft.specdec:50052"]
    for version in VERSIONS:
        kubernetes_validate.validate(policy, version, strict=True)


def test_the_manual_names_every_variable_of_the_bridge() -> None:
    manual = (ROOT / "docs" / "vllm-bridge.md").read_text()
    for name in BridgeSettings.model_fields:
        assert f"`SPECDEC_{name.upper()}`" in manual or f"`_{name.removeprefix('tls_').upper()}`" in manual
    config = re.search(r"\{\"method\".*\}", manual)
    assert config is not None
    assert json.loads(config.group())["model"] == f"{RemoteDraft.__module__}.{RemoteDraft.__name__}"


@pytest.mark.slow
def test_the_workflows_are_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    run = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_workflows_check_what_there_is_and_publish_every_image() -> None:
    checks, images = (yaml.safe_load(file.read_text()) for file in WORKFLOWS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [step["run"] for step in checks["jobs"]["checks"]["steps"] if "run" in step]
    assert set(re.findall(r"make ([a-z-]+)", " ".join(asked))) <= targets
    stages = set(
        re.findall(r"^FROM .* AS (\w+)$", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    )
    assert set(images["jobs"]["images"]["strategy"]["matrix"]["role"]) == set(SETTINGS) <= stages
