"""The chart renders what kustomize renders, and its values change what they say."""

from __future__ import annotations

import functools
import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.helm import generate
from tests.checkout import ROOT
from tests.deploy.manifests import Manifest, container, environment, kind, pod, rendered, renders
from tests.deploy.test_manifests import SETTINGS, VERSIONS, combinations

helm = pytest.importorskip("helm_python", reason="Helm's engine is not installed")
CHART = ROOT / "deploy" / "helm" / "specdec"


@functools.cache
def chart() -> Any:
    return helm.Chart.load(str(CHART))


def values(overlay: str, components: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """With ``more`` of them, by their parts: target={"replicas": 3}."""
    chosen: dict[str, Any] = {"overlay": overlay, "namespace": {"create": True}}
    for component in components:
        _, _, section, name = generate.VALUES[component].split(".")
        chosen.setdefault(section, {})[name] = True
    for section, fields in more.items():
        chosen[section] = {**chosen.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return chosen


def manifests(values: dict[str, Any], namespace: str = "specdec") -> list[Manifest]:
    """As ``helm template --namespace`` gives them."""
    files = chart().render(values, name="specdec", namespace=namespace)
    return [manifest for text in files.values() for manifest in yaml.safe_load_all(text) if manifest]


def by_name(value: Any) -> Any:
    """With lists of things that have names in the order of the names: theirs has no meaning."""
    if isinstance(value, dict):
        return {key: by_name(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [by_name(item) for item in value]
        return sorted(inner, key=lambda item: item["name"]) if generate._has_names(value) else inner
    return value


def named(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(manifest["kind"], manifest["metadata"]["name"]): by_name(manifest) for manifest in manifests}


@renders
@combinations
def test_the_chart_renders_what_kustomize_renders(overlay: str, components: tuple[str, ...]) -> None:
    ours, theirs = named(manifests(values(overlay, components))), named(rendered(overlay, components))
    assert set(ours) == set(theirs)
    for name, manifest in theirs.items():
        assert ours[name] == manifest


@renders
def test_the_chart_is_up_to_date() -> None:
    assert generate.template(rendered) == generate.OUTPUT.read_text(), "run python -m deploy.helm.generate"


def test_the_chart_has_nothing_that_helm_complains_about() -> None:
    report = helm.lint(str(CHART))
    assert not [message for message in report["messages"] if message["severity"] > 1], report


def test_values_change_the_services_they_name() -> None:
    chosen = values(
        "single-node-gpu",
        ("gateway", "gateway-api", "queue-autoscaling"),
        image={"registry": "registry.example.com/me/", "tag": 1.5},
        target={"model": "/models/other", "head": "/models/head", "tensorParallel": 4, "env": {"SPECDEC_THREADS": "2"}},
        draft={"replicas": 3, "nodeSelector": {"pool": "drafts"}, "env": {"SPECDEC_DEVICE": "cuda:1"}},
        orchestrator={"env": {"SPECDEC_METHODS": "coupled"}, "resources": {"requests": {"cpu": "4"}}},
        gateway={"replicas": 0},
        models={"storage": "1Ti", "storageClass": "fast"},
        host="llm.example.com",
        autoscaling={"prometheus": "http://elsewhere:9090"},
    )
    rendering = manifests(chosen, "other")
    for manifest in rendering:
        where = manifest["metadata"]["name" if manifest["kind"] == "Namespace" else "namespace"]
        assert where == "other"
        try:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            assert manifest["kind"] in ("Gateway", "GRPCRoute", "BackendTrafficPolicy", "ScaledObject")
    services = kind(rendering, "Deployment")
    target, draft, orchestrator = (services[role] for role in ("target", "draft", "orchestrator"))
    assert container(target)["image"] == "registry.example.com/me/specdec-target:1.5"
    set_ = environment(container(target))
    assert (set_["SPECDEC_MODEL"], set_["SPECDEC_HEAD"]) == ("/models/other", "/models/head")
    assert (set_["SPECDEC_ENGINE"], set_["SPECDEC_VLLM__TENSOR_PARALLEL_SIZE"]) == ("vllm", "4")
    assert set_["SPECDEC_THREADS"] == "2"
    assert container(target)["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 4}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(target)["volumeMounts"]
    assert draft["spec"]["replicas"] == 3
    assert pod(draft)["nodeSelector"] == {"pool": "drafts"}
    assert [item["value"] for item in container(draft)["env"] if item["name"] == "SPECDEC_DEVICE"] == ["cuda:1"]
    assert environment(container(orchestrator))["SPECDEC_METHODS"] == "coupled"
    assert environment(container(orchestrator))["SPECDEC_TOKENIZER"] == "/models/other"
    assert container(orchestrator)["resources"] == {"requests": {"cpu": "4"}}
    assert services["gateway"]["spec"]["replicas"] == 0
    [claim] = kind(rendering, "PersistentVolumeClaim").values()
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Ti"}}
    assert claim["spec"]["storageClassName"] == "fast"
    assert kind(rendering, "GRPCRoute")["specdec"]["spec"]["hostnames"] == ["llm.example.com"]
    text = json.dumps(kind(rendering, "ScaledObject"))
    assert "http://elsewhere:9090" in text
    assert "example.com" not in text
    assert 'namespace=\\"other\\"' in text


def test_the_namespace_is_left_to_helm() -> None:
    assert not kind(manifests({}), "Namespace")


@pytest.mark.parametrize(
    "wrong", [{"overlay": "cpu"}, {"draft": {"modle": "x"}}, {"tls": {"enabled": "yes"}}, {"tsl": {}}]
)
def test_a_value_that_there_is_not_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match=r"overlay|modle|enabled|tsl"):
        chart().validate_schema(chart().merge_values(wrong))


def test_every_role_has_its_values() -> None:
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(SETTINGS) <= set(known)
