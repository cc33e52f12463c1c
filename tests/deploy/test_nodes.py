"""Where pods with models go: how many GPUs each asks for, and which nodes share a target."""

from __future__ import annotations

import itertools

import pytest

from target_service.__main__ import TargetSettings
from tests.deploy.manifests import OVERLAYS, container, deployments, environment, kind, pod, rendered, renders


@renders
def test_models_with_gpus_ask_for_as_many_as_they_use_and_on_one_node_are_where_the_claim_is() -> None:
    for overlay, role in itertools.product(OVERLAYS, ("target", "draft")):
        only = container(deployments(overlay, ())[role])
        wanted = {"cpu-demo": 0, "multi-node-target": 8 if role == "target" else 1}.get(overlay, 1)
        assert only["resources"]["limits"].get("nvidia.com/gpu", 0) == wanted
        assert environment(only).get("SPECDEC_DEVICE", "cpu") == ("cuda:0" if wanted else "cpu")
    [claim] = kind(rendered("single-node-gpu"), "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    for deployment in deployments("single-node-gpu", ()).values():
        assert pod(deployment)["nodeSelector"] == {"specdec-pool": "all"}
        assert "nvidia.com/gpu" in {each["key"] for each in pod(deployment)["tolerations"]}


@renders
def test_nodes_that_share_a_target_agree_on_it_and_only_the_first_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = rendered("multi-node-target")
    first, [other] = deployments("multi-node-target", ())["target"], kind(manifests, "StatefulSet").values()
    shared = {}
    for node in (first, other):
        only = container(node)
        shared[node["kind"]] = {name: value for name, value in environment(only).items() if "VLLM" in name}
        assert {"name": "shm", "mountPath": "/dev/shm"} in only["volumeMounts"]
        assert pod(node)["securityContext"] == pod(first)["securityContext"]
        assert only["securityContext"] == container(first)["securityContext"]
        assert (only["image"], only["command"]) == ("specdec-target:dev", ["specdec", "serve", "target"])
        for same in ("resources", "volumeMounts"):
            assert sorted(map(str, only[same])) == sorted(map(str, container(first)[same]))
        with monkeypatch.context() as patched:
            for name, value in environment(only).items():
                patched.setenv(name, value)
            vllm = TargetSettings().vllm
        num_gpus = only["resources"]["limits"]["nvidia.com/gpu"] * vllm.nnodes
        assert vllm.tensor_parallel_size == num_gpus
    assert shared["Deployment"] == shared["StatefulSet"] != {}
    assert vllm.nnodes == first["spec"]["replicas"] + other["spec"]["replicas"]
    assert other["spec"]["ordinals"]["start"] == 1, "the first has rank 0"
    [rank] = [each for each in container(other)["env"] if each["name"] == "SPECDEC_VLLM__NODE_RANK"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert not {"ports", "readinessProbe", "livenessProbe"} & container(other).keys()
    services = kind(manifests, "Service")
    master = services[vllm.master_addr]["spec"]
    assert master["publishNotReadyAddresses"] is True
    assert master["selector"] == services["target"]["spec"]["selector"], "the first node"
    assert [each["port"] for each in master["ports"]] == [vllm.master_port]
    labels = other["spec"]["template"]["metadata"]["labels"]
    assert not services["target"]["spec"]["selector"].items() <= labels.items()
    assert pod(deployments("multi-node-target", ())["draft"])["nodeSelector"] != pod(first)["nodeSelector"]


@renders
def test_on_several_nodes_targets_spread_orchestrators_go_beside_them_and_drafts_elsewhere() -> None:
    pods = {role: pod(each) for role, each in deployments("multi-node", ()).items()}
    assert pods["target"]["nodeSelector"] != pods["draft"]["nodeSelector"]
    [spread] = pods["target"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
    [beside] = pods["orchestrator"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert beside["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert beside["podAffinityTerm"]["labelSelector"]["matchLabels"] == {"app.kubernetes.io/component": "target"}
