"""A small kubelet and its controllers: runs the Deployments of rendered manifests as processes of this machine.

Each pod has its own address of loopback, so all ports stay as the manifests say. Taken from the manifests: commands,
environment, secrets, probes, preStop, grace periods, replicas, surge, services' selectors. Left out: images, other
volumes, limits, network policies, nodes. Replaced: SPECDEC_HOST (the pod's address), the directories of secrets, what a
command runs, and minReadySeconds, which is shorter because names here are not cached for 30 s as by a cluster's DNS.
A ``hurry`` divides the periods of names and probes, preStop's pause and the age of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.settings import OrchestratorSettings
from specdec.cli.processes import is_serving
from testing.patience import eventually
from tests.balancer import Balancer
from tests.checkout import ROOT
from tests.deploy.manifests import Manifest, container, environment, kind, ports

PROPAGATION_S = 1.0
"""Until senders of connections know that a pod goes away."""
_RESTART_AFTER_S = 1.0
_RESOLVE_EVERY_S: float = OrchestratorSettings.model_fields["resolve_every_s"].default
_PATIENCE_S = 120.0

Programs = Mapping[tuple[str, ...], Sequence[str]]
"""What the manifests' commands run here."""

OURS: Programs = {
    ("specdec", "serve", role): (sys.executable, "-m", "specdec.cli.main", "serve", role)
    for role in ("target", "draft", "orchestrator")
}


class Pod:
    """One container: started, probed, restarted when it ends or is not alive, ended within its grace period."""

    def __init__(
        self,
        deployment: Manifest,
        address: str,
        program: Sequence[str],
        variables: Mapping[str, str],
        secrets: Mapping[str, Path],
        hurry: float,
    ) -> None:
        self.labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
        self.address = address
        self.started = self.ready = self.listed = False
        self.ready_since = float("inf")
        self.num_restarts = 0
        self.exit_status: int | None = None
        self.log = tempfile.NamedTemporaryFile(prefix="pod-", suffix=".log")  # noqa: SIM115
        self._container = container(deployment)
        self._grace_s: float = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        self._program = program
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPECDEC_", "OTEL_"))}
        given = _with_secrets(environment(self._container), deployment, secrets)
        if age_s := given.get("SPECDEC_MAX_CONNECTION_AGE_S"):
            given["SPECDEC_MAX_CONNECTION_AGE_S"] = str(float(age_s) / hurry)
        self._environment = {**clean, **given, **variables, "SPECDEC_HOST": address}
        self._hurry = hurry
        self._process: asyncio.subprocess.Process | None = None
        self._terminating = False
        self._task = asyncio.create_task(self._run())

    @property
    def port(self) -> int:
        return ports(self._container)["grpc"]

    def available(self, min_ready_s: float) -> bool:
        return self.ready and time.monotonic() - self.ready_since >= min_ready_s

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def said(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    async def terminate(self, grace_s: float | None = None) -> None:
        """As ``kubectl delete pod``, with the manifest's grace period or ``grace_s``; returns when it has ended."""
        self._terminating = True
        deadline = time.monotonic() + (self._grace_s if grace_s is None else grace_s)
        propagation_s = PROPAGATION_S / self._hurry
        asyncio.get_running_loop().call_later(propagation_s, setattr, self, "listed", False)
        pause_s = self._container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        await asyncio.sleep(min(pause_s / self._hurry, max(0.0, deadline - time.monotonic())))
        await self._end(deadline - time.monotonic())
        await self._task
        await asyncio.sleep(propagation_s)

    async def _end(self, grace_s: float) -> None:
        assert self._process is not None
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), max(0.0, grace_s))
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()

    async def _run(self) -> None:
        while True:
            options: dict[str, Any] = dict(cwd=ROOT, stdout=self.log, stderr=self.log, start_new_session=True)
            self._process = await asyncio.create_subprocess_exec(*self._program, env=self._environment, **options)
            ended, given_up = asyncio.create_task(self._process.wait()), asyncio.create_task(self._probe())
            await asyncio.wait({ended, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not self._terminating:
                await self._end(self._grace_s)
            self.exit_status = await ended
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            self.started = self.ready = self.listed = False
            if self._terminating:
                return
            self.num_restarts += 1
            await asyncio.sleep(_RESTART_AFTER_S)

    async def _probe(self) -> None:
        """Returns when the container is to be restarted."""
        await self._failed("startupProbe", self._on_startup)
        if self.started:
            readiness = asyncio.create_task(self._failed("readinessProbe", self._on_readiness))
            try:
                await self._failed("livenessProbe", lambda _: False)
            finally:
                readiness.cancel()
                await asyncio.gather(readiness, return_exceptions=True)

    async def _failed(self, name: str, told: Callable[[bool], bool]) -> None:
        """Returns when the probe has failed as often in a row as its threshold, or when ``told`` returns True."""
        probe = self._container[name]
        failures = 0
        while True:
            good = await is_serving(
                f"{self.address}:{probe['grpc']['port']}", probe["timeoutSeconds"], probe["grpc"].get("service", "")
            )
            failures = 0 if good else failures + 1
            if (good and told(True)) or (failures >= probe["failureThreshold"] * self._hurry and not told(False)):
                return
            await asyncio.sleep(probe["periodSeconds"] / self._hurry)

    def _on_startup(self, good: bool) -> bool:
        self.started = good
        return good

    def _on_readiness(self, good: bool) -> bool:
        """Never ends anything."""
        if good and not self.ready:
            self.ready_since = time.monotonic()
        self.ready = good
        if not self._terminating:
            self.listed = good
        return not good

    async def close(self) -> None:
        self._terminating = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        await self._task
        self.log.close()


def _with_secrets(given: Mapping[str, str], deployment: Manifest, secrets: Mapping[str, Path]) -> dict[str, str]:
    """With the files of this machine in place of those of mounted secrets."""
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    found = dict(given)
    for mount in container(deployment)["volumeMounts"]:
        if (secret := volumes[mount["name"]].get("secret")) is None:
            continue
        for name, value in given.items():
            directory, _, key = value.rpartition("/")
            if directory == mount["mountPath"]:
                found[name] = str(secrets[secret["secretName"]] / key)
    return found


class Node:
    """``async with Node(manifests)``; nothing runs before ``scale``. ``service`` is the address of all orchestrators.

    ``secrets`` are directories with a file for each key. A ``hurry`` shortens periods; what a probe tolerates stays.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        manifests: Sequence[Manifest],
        programs: Programs = OURS,
        secrets: Mapping[str, Path] | None = None,
        hurry: float = 1.0,
    ) -> None:
        self.deployments = kind(manifests, "Deployment")
        self.pods: dict[str, list[Pod]] = {name: [] for name in self.deployments}
        self.ended: list[Pod] = []
        self._services = kind(manifests, "Service")
        self._programs = programs
        self._secrets = secrets or {}
        self._hurry = hurry
        self._directory = tempfile.TemporaryDirectory(prefix="node-")
        self._hosts = Path(self._directory.name) / "hosts"
        # Nodes of several test runs side by side do not meet.
        self._network = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        self.service = Balancer(lambda: [(pod.address, pod.port) for pod in self.endpoints("orchestrator")])

    async def __aenter__(self) -> Node:
        self._write_hosts()
        self._names = asyncio.create_task(self._keep_names())
        await self.service.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.__aexit__()
        self._names.cancel()
        await asyncio.gather(self._names, return_exceptions=True)
        for pod in (*itertools.chain(*self.pods.values()), *self.ended):
            await pod.close()
        self._directory.cleanup()

    def endpoints(self, service: str) -> list[Pod]:
        """The pods that a Service's selector finds and that are ready."""
        selector = self._services[service]["spec"]["selector"].items()
        everyone = (*itertools.chain(*self.pods.values()), *self.ended)
        return [pod for pod in everyone if pod.listed and selector <= pod.labels.items()]

    async def scale(self, name: str, replicas: int | None = None) -> None:
        """To ``replicas``, or the manifest's number. Returns when all are available and surplus pods have ended."""
        wanted = self.deployments[name]["spec"].get("replicas", 1) if replicas is None else replicas
        pods = self.pods[name]
        leaving, self.pods[name] = pods[wanted:], pods[:wanted]
        self.ended += leaving
        self.pods[name] += [self._start(name) for _ in range(wanted - len(pods))]
        await asyncio.gather(*(pod.terminate() for pod in leaving), self._all_available(name))

    async def rollout(self, name: str) -> None:
        """Every pod replaced by a new one, as many at a time as the manifest allows."""
        strategy = self.deployments[name]["spec"]["strategy"]["rollingUpdate"]
        leaving: list[asyncio.Task[None]] = []
        for old in list(self.pods[name]):
            if not strategy["maxSurge"]:
                leaving.append(self._leave(name, old))
                await leaving[-1]
            self.pods[name].append(self._start(name))
            await self._all_available(name)
            if strategy["maxSurge"]:
                leaving.append(self._leave(name, old))
        await asyncio.gather(*leaving)

    def _leave(self, name: str, pod: Pod) -> asyncio.Task[None]:
        self.pods[name].remove(pod)
        self.ended.append(pod)
        return asyncio.create_task(pod.terminate())

    def _start(self, name: str) -> Pod:
        deployment = self.deployments[name]
        variables = {
            "POD_HOSTS": str(self._hosts),
            "PYTHONPATH": f"{Path(__file__).parent / 'pod'}:{ROOT}",
            "SPECDEC_RESOLVE_EVERY_S": str(_RESOLVE_EVERY_S / self._hurry),
        }
        program = self._programs[tuple(container(deployment)["command"])]
        address = f"{self._network}.{next(self._numbers)}"
        return Pod(deployment, address, program, variables, self._secrets, self._hurry)

    async def _all_available(self, name: str) -> None:
        # By then all orchestrators have looked up its name again.
        min_ready_s = min((_RESOLVE_EVERY_S + 1.0) / self._hurry, self.deployments[name]["spec"]["minReadySeconds"])
        try:
            await eventually(lambda: all(pod.available(min_ready_s) for pod in self.pods[name]), _PATIENCE_S)
        except TimeoutError:
            logs = "\n".join(pod.said()[-2000:] for pod in self.pods[name])
            raise AssertionError(f"{name} did not become available:\n{logs}") from None

    async def _keep_names(self) -> None:
        while True:
            self._write_hosts()
            await asyncio.sleep(0.2)

    def _write_hosts(self) -> None:
        lines = [
            " ".join([name, *(pod.address for pod in self.endpoints(name))])
            for name, service in self._services.items()
            if service["spec"].get("clusterIP") == "None"
        ]
        draft = self._hosts.with_suffix(".new")
        draft.write_text("\n".join(lines) + "\n")
        with contextlib.suppress(FileNotFoundError):
            draft.rename(self._hosts)


def status_of(pods: Sequence[Pod]) -> list[Any]:
    """Per pod that has ended: its exit status and its number of restarts."""
    return [(pod.exit_status, pod.num_restarts) for pod in pods]
