"""The manifests render, are valid, and agree with the services: settings, ports, probes, images, grace periods."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from draft_service.__main__ import DraftSettings
from gateway.settings import GatewaySettings
from orchestrator.settings import OrchestratorSettings
from specdec.cli.main import Role
from specdec.transport.rpc import LIVENESS
from target_service.__main__ import TargetSettings
from tests.checkout import ROOT
from tests.deploy.manifests import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    ROLES,
    container,
    deployments,
    environment,
    fragments,
    kind,
    pod,
    ports,
    rendered,
    renders,
)

SETTINGS: dict[str, Any] = {
    **{"target": TargetSettings, "draft": DraftSettings, "orchestrator": OrchestratorSettings},
    "gateway": GatewaySettings,
}
PORTS = {"orchestrator": 50050, "target": 50051, "draft": 50052}
METRICS_PORT, HEALTH_PORT = 9464, 50059
VERSIONS = ("1.30", "1.37")
"""preStop by sleep is from 1.30 on."""

OF_OTHERS = {"PodMonitor", "ScaledObject", "Gateway", "GRPCRoute", "BackendTrafficPolicy"}
"""Kinds of which Kubernetes itself has no schema."""

CHOICES: list[tuple[str, tuple[str, ...]]] = [
    *itertools.product(OVERLAYS, ((), tuple(COMPONENTS))),
    *(("cpu-demo", (each,)) for each in COMPONENTS),
]
combinations = pytest.mark.parametrize(
    ("overlay", "components"), CHOICES, ids=lambda value: value if isinstance(value, str) else "-".join(value[:2])
)


def fields(role: str) -> set[str]:
    return {f"SPECDEC_{name.upper()}" for name in SETTINGS[role].model_fields}


def test_every_variable_in_the_files_is_a_setting_of_the_service_that_gets_it() -> None:
    seen = set()
    for file, deployment in fragments():
        name = deployment["metadata"]["name"]
        roles = {"any": ROLES, **{role: (role,) for role in SETTINGS}}[name]
        if "model-service" in file.name:
            roles = ("target", "draft")
        for each in pod(deployment).get("containers", []):
            for variable in each.get("env", []):
                seen.add(variable["name"])
                if variable["name"].startswith("SPECDEC_"):
                    for role in roles:
                        assert variable["name"].split("__")[0] in fields(role), f"{file}: {variable['name']} of {role}"
                        assert isinstance(variable.get("value", ""), str), f"{file}: {variable} must be quoted"
    assert {"SPECDEC_PORT", "SPECDEC_TLS_CERT", "SPECDEC_DEVICE", "SPECDEC_API_KEYS_FILE"} <= seen


def test_images_and_commands_are_those_of_the_build_and_the_command_line() -> None:
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    assert {each["name"]: each["newTag"] for each in base["images"]} == {f"specdec-{role}": "dev" for role in ROLES}
    named = {}
    for _, deployment in fragments():
        for each in pod(deployment).get("containers", []):
            if "image" in each:
                named[deployment["metadata"]["name"]] = (each["image"], each["command"])
    assert named == {role: (f"specdec-{role}", ["specdec", "serve", role]) for role in [each.value for each in Role]}


@renders
def test_every_combination_renders_and_is_valid() -> None:
    distinct = {}
    for overlay, components in CHOICES:
        manifests = rendered(overlay, components)
        kinds = {manifest["kind"] for manifest in manifests}
        assert {"Namespace", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
        distinct |= {json.dumps(manifest, sort_keys=True): manifest for manifest in manifests}
    for manifest, version in itertools.product(distinct.values(), VERSIONS):
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            assert manifest["kind"] in OF_OTHERS


@renders
@combinations
def test_services_accept_the_variables_that_are_set(
    overlay: str, components: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_file = tmp_path / "file"
    a_file.touch()
    for role, deployment in deployments(overlay, components).items():
        set_ = environment(container(deployment))
        with monkeypatch.context() as patched:
            for name, value in set_.items():
                patched.setenv(name, str(a_file) if value.startswith("/etc/specdec/") else value)
            settings = SETTINGS[role]()
        assert settings.host == "0.0.0.0"
        assert settings.port == PORTS[role] == ports(container(deployment))["grpc"]
        assert set_["SPECDEC_METRICS_PORT"] == str(METRICS_PORT)
        assert ports(container(deployment))["metrics"] == METRICS_PORT
        tls = {name for name in set_ if name.startswith("SPECDEC_TLS_")}
        if "tls" in components:
            assert len(tls) == 3
            assert "SPECDEC_INSECURE" not in set_
            assert set_["SPECDEC_HEALTH_PORT"] == str(HEALTH_PORT)
        else:
            assert not tls
            assert set_["SPECDEC_INSECURE"] == "true"
        mounts = {each["mountPath"] for each in container(deployment)["volumeMounts"]}
        for value in set_.values():
            if value.startswith("/"):
                assert any(value.startswith(f"{mount}/") for mount in mounts), f"{value} of {role} is mounted nowhere"


@renders
@combinations
def test_probes_ask_the_right_port_and_health_service_and_wait_long_enough(
    overlay: str, components: tuple[str, ...]
) -> None:
    for role, deployment in deployments(overlay, components).items():
        only = container(deployment)
        port = HEALTH_PORT if "tls" in components else PORTS[role]
        assert port in ports(only).values()
        assert only["readinessProbe"]["grpc"] == {"port": port}
        assert only["livenessProbe"]["grpc"] == {"port": port, "service": LIVENESS}
        # An orchestrator is ready once a target is, so a target that loads for long must not restart it.
        started = "livenessProbe" if role == "orchestrator" else "readinessProbe"
        assert only["startupProbe"]["grpc"] == only[started]["grpc"]
        startup_s = only["startupProbe"]["periodSeconds"] * only["startupProbe"]["failureThreshold"]
        assert startup_s >= (60 if role == "orchestrator" else 600), "a large model takes minutes to load"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert only[probe]["timeoutSeconds"] > 1, "a busy event loop is not a dead one"
        spec = deployment["spec"]
        deadline_s = spec.get("progressDeadlineSeconds", 600)
        assert startup_s + spec["minReadySeconds"] < deadline_s, "no rollout fails while a pod may still start"
        slowest = container(deployments(overlay, components)["target"])["startupProbe"]
        waits_s = slowest["periodSeconds"] * slowest["failureThreshold"] if role == "orchestrator" else 0
        assert waits_s < deadline_s, "or waits for its target"


@renders
@combinations
def test_there_is_time_to_end_in_good_order(overlay: str, components: tuple[str, ...]) -> None:
    found = deployments(overlay, components)
    for deployment in found.values():
        set_ = environment(container(deployment))
        before_s = container(deployment).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = pod(deployment)["terminationGracePeriodSeconds"]
        assert grace_s >= before_s + float(set_["SPECDEC_SHUTDOWN_GRACE_S"]) + 5
    set_ = environment(container(found["orchestrator"]))
    assert float(set_["SPECDEC_SHUTDOWN_GRACE_S"]) >= float(set_["SPECDEC_REQUEST_TIMEOUT_S"]), "no request is cut off"
    before_s = container(found["orchestrator"])["lifecycle"]["preStop"]["sleep"]["seconds"]
    # gRPC draws the age of a connection within 10 % of it.
    assert before_s > 1.1 * float(set_["SPECDEC_MAX_CONNECTION_AGE_S"]), "clients' connections have left by SIGTERM"
    for role in ("target", "draft"):
        assert found[role]["spec"]["minReadySeconds"] >= 35, "DNS remembers for 30 s, the pool looks every 5 s"
    for scaler in kind(rendered(overlay, components), "HorizontalPodAutoscaler").values():
        scaled = kind(rendered(overlay, components), "Deployment")[scaler["spec"]["scaleTargetRef"]["name"]]
        window_s = scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
        assert window_s > pod(scaled)["terminationGracePeriodSeconds"]


@renders
@combinations
def test_pods_are_restricted(overlay: str, components: tuple[str, ...]) -> None:
    for deployment in deployments(overlay, components).values():
        spec, only = pod(deployment), container(deployment)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["runAsGroup"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "secret", "persistentVolumeClaim"}
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440
            assert volume.get("persistentVolumeClaim", {"readOnly": True})["readOnly"] is True
        assert "memory" in only["resources"]["limits"]
    [namespace] = kind(rendered(overlay, components), "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@renders
@combinations
def test_everything_that_is_named_exists(overlay: str, components: tuple[str, ...]) -> None:
    manifests = rendered(overlay, components)
    found = deployments(overlay, components)
    labels = {role: each["spec"]["template"]["metadata"]["labels"] for role, each in found.items()}

    def selected(selector: dict[str, str]) -> set[str]:
        return {role for role in ROLES if selector.items() <= labels[role].items()}

    for role, deployment in found.items():
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == {role}
        service = kind(manifests, "Service")[role]["spec"]
        assert selected(service["selector"]) == {role}
        assert [(each["port"], each["targetPort"]) for each in service["ports"]] == [(PORTS[role], "grpc")]
        assert (service.get("clusterIP") == "None") == (role != "orchestrator"), "pools find all; clients one"
        budget = kind(manifests, "PodDisruptionBudget")[role]["spec"]
        assert selected(budget["selector"]["matchLabels"]) == {role}
    set_ = environment(container(found["orchestrator"]))
    assert set_["SPECDEC_TARGET"] == f"target:{PORTS['target']}"
    assert set_["SPECDEC_DRAFT"] == f"draft:{PORTS['draft']}"
    volumes = [volume for each in found.values() for volume in pod(each)["volumes"]]
    claimed = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
    assert claimed == set(kind(manifests, "PersistentVolumeClaim"))
    for each in manifests:
        assert each["metadata"].get("namespace", "specdec") == "specdec"
        if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            scaled = each["spec"]["scaleTargetRef"]["name"]
            assert "replicas" not in kind(manifests, "Deployment")[scaled]["spec"], (
                "apply would undo what the scaler did"
            )
        if each["kind"] == "PodMonitor":
            assert selected(each["spec"]["selector"]["matchLabels"]) == set(ROLES)
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                assert all(endpoint["port"] in ports(container(deployment)) for deployment in found.values())
        if each["kind"] == "GRPCRoute":
            for rule in each["spec"]["rules"]:
                assert [(to["name"], to["port"]) for to in rule["backendRefs"]] == [("orchestrator", 50050)]
                assert rule["matches"], "without any it takes everything"
                for match in rule["matches"]:
                    assert match["method"]["service"] == "specdec.v1.GenerationService"


@renders
@combinations
def test_network_policies_allow_only_the_calls_that_there_are(overlay: str, components: tuple[str, ...]) -> None:
    policies = kind(rendered(overlay, components), "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

    def allowed(direction: str, peers: str) -> set[tuple[str, str, int]]:
        """(the policy's role, the other side or 'others', port)"""
        found = set()
        for name, policy in policies.items():
            mine = policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component", "all")
            for rule in policy["spec"].get(direction, []):
                assert rule.get(peers), f"{name} has a rule for all peers"
                for peer, port in itertools.product(rule[peers], rule.get("ports", [])):
                    labels = peer.get("podSelector", {}).get("matchLabels", {})
                    other = labels.get("app.kubernetes.io/component", "others")
                    found.add((mine, other, port["port"]))
        return found

    expected_in = {("orchestrator", "others", 50050)} | {
        (role, "orchestrator", PORTS[role]) for role in ("target", "draft")
    }
    if "gateway" in components:
        expected_in |= {("gateway", "others", 8000), ("orchestrator", "gateway", 50050)}
    if "pod-monitor" in components:
        expected_in.add(("all", "others", METRICS_PORT))
    assert allowed("ingress", "from") == expected_in
    expected_out = {("orchestrator", "target", 50051), ("orchestrator", "draft", 50052), ("orchestrator", "others", 53)}
    if "gateway" in components:
        expected_out |= {("gateway", "orchestrator", 50050), ("gateway", "others", 53)}
    of_nodes = policies.get("between-target-nodes")
    assert allowed("egress", "to") == expected_out | ({("all", "others", 53)} if of_nodes else set())
    if of_nodes:
        nodes, [into], [out, _] = (of_nodes["spec"][part] for part in ("podSelector", "ingress", "egress"))
        assert nodes["matchExpressions"][0]["values"] == ["target", "target-node"]
        assert into == {"from": [{"podSelector": nodes}]}
        assert out == {"to": [{"podSelector": nodes}]}, "all ports, but only among themselves"


@renders
@pytest.mark.parametrize("components", [("gateway",), ("gateway", "tls")])
def test_the_gateway_is_as_restricted_as_the_others_and_asked_over_http(components: tuple[str, ...]) -> None:
    found = kind(rendered("cpu-demo", components), "Deployment")
    gateway, other = found["gateway"], found["orchestrator"]
    own, theirs = container(gateway), container(other)
    assert own["securityContext"] == theirs["securityContext"]
    assert pod(gateway)["securityContext"] == pod(other)["securityContext"]
    assert not pod(gateway)["automountServiceAccountToken"]
    for probe, path in (("readinessProbe", "/health"), ("livenessProbe", "/ping")):
        assert (own[probe]["httpGet"]["path"], own[probe]["httpGet"]["port"]) == (path, "http")
        assert own[probe]["httpGet"].get("scheme", "HTTP") == ("HTTPS" if "tls" in components else "HTTP")
        assert "grpc" not in own[probe]
    set_ = environment(own)
    assert set_["SPECDEC_PORT"] == str(ports(own)["http"]) == "8000"
    assert set_["SPECDEC_ORCHESTRATOR"] == "orchestrator:50050"
    assert ("SPECDEC_TLS_CA" in set_) == ("SPECDEC_INSECURE" not in set_) == ("tls" in components)
    grace_s = pod(gateway)["terminationGracePeriodSeconds"]
    assert grace_s > float(set_["SPECDEC_SHUTDOWN_GRACE_S"]) + own["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert float(set_["SPECDEC_SHUTDOWN_GRACE_S"]) >= float(set_["SPECDEC_REQUEST_TIMEOUT_S"])


def test_the_job_that_copies_models_is_valid_and_as_restricted_as_the_services() -> None:
    job = yaml.safe_load((KUBERNETES / "copy-models.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)
    own, base = pod(job), pod(yaml.safe_load((KUBERNETES / "base" / "pod.yaml").read_text()))
    [only], [service] = own["containers"], base["containers"]
    assert own["securityContext"] == base["securityContext"]
    assert only["securityContext"] == service["securityContext"]
    assert "readOnly" not in only["volumeMounts"][0]
    [volume] = own["volumes"]
    single = KUBERNETES / "overlays" / "single-node-gpu"
    claim = yaml.safe_load((single / "models.yaml").read_text())
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert job["metadata"]["namespace"] == claim["metadata"]["namespace"]
    assert own["nodeSelector"] == pod(yaml.safe_load((single / "node.yaml").read_text()))["nodeSelector"]


def test_the_manual_builds_every_image_and_makes_every_secret():
    """Of the names that the manifests have for what is ours: an image or the secret of a service's certificate."""
    told = (ROOT / "docs" / "kubernetes.md").read_text()
    texts = "".join(file.read_text() for file in KUBERNETES.rglob("*.yaml"))
    images = set(re.findall(r"image: specdec-(\w+)", texts))
    secrets = set(re.findall(r"secretName: specdec-tls-(\w+)", texts))
    loops = [set(names.split()) for names in re.findall(r"for (?:role|service) in ([a-z ]+);", told)]
    assert images == secrets == {*ROLES, "gateway"}
    assert len(loops) == 3
    assert all(loop == images for loop in loops)
    for image in images:
        assert f"{{name: specdec-{image}, " in told
