"""A rollout is given as long as its pods are."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import OVERLAYS, container, kind, needs_kubectl, rendered

pytestmark = pytest.mark.slow


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rollout_is_no_failure_while_a_pod_may_still_start(overlay: str) -> None:
    deployments = kind(rendered(overlay), "Deployment")
    assert len(deployments) >= 3
    for name, deployment in deployments.items():
        probe, spec = container(deployment)["startupProbe"], deployment["spec"]
        starting_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert starting_s + spec["minReadySeconds"] < spec.get("progressDeadlineSeconds", 600), name
