"""The Kubernetes manifests, rendered as kubectl does it, and parts of them. Judges nothing."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm import generate

KUBERNETES, OVERLAYS = generate.KUBERNETES, generate.OVERLAYS
ROLES = ("target", "draft", "orchestrator")
COMPONENTS = sorted(each.name for each in (KUBERNETES / "components").iterdir() if each.name != "gpu")
"""Those a user may add; `gpu` is a part of two overlays."""

Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def renders(test: Any) -> Any:
    """Marks a test that calls ``rendered``."""
    return pytest.mark.slow(needs_kubectl(test))


@functools.cache
def rendered(overlay: str, components: Sequence[str] = ()) -> list[Manifest]:
    """See deploy.helm.generate."""
    return generate.rendered(overlay, components)


def kind(manifests: Sequence[Manifest], name: str) -> dict[str, Manifest]:
    """Those of one kind, by their names."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == name}


def pod(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


def container(deployment: Manifest) -> Manifest:
    [only] = pod(deployment)["containers"]
    return dict(only)


def environment(container: Manifest) -> dict[str, str]:
    """Without what is known only once the pod runs."""
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def ports(container: Manifest) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container.get("ports", [])}


def fragments() -> Iterator[tuple[Path, Manifest]]:
    """Every Deployment and part of one in the files, also inside kustomizations."""
    for file in sorted(KUBERNETES.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            patches = [yaml.safe_load(each["patch"]) for each in document.get("patches", []) if "patch" in each]
            for each in (document, *patches):
                if isinstance(each, dict) and each.get("kind") == "Deployment":
                    yield file, each


def deployments(overlay: str, components: tuple[str, ...]) -> dict[str, Manifest]:
    found = kind(rendered(overlay, components), "Deployment")
    assert set(found) == {*ROLES, *({"gateway"} & set(components))}
    return {role: found[role] for role in ROLES}
