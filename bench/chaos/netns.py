"""A network namespace with a link that can drop all packets. Needs root and iproute2; knows no services."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence


class Namespace:
    """A network namespace, removed by ``async with``. Processes with ``prefix`` listen on ``address`` inside it."""

    def __init__(self, number: int) -> None:
        self._name = f"chaos{number}"
        self._outer, self._inner = f"ch{number}a", f"ch{number}b"
        self._net = f"10.213.{number % 250}"
        self.address = f"{self._net}.2"
        self.prefix: Sequence[str] = ("ip", "netns", "exec", self._name)

    @staticmethod
    async def create() -> Namespace | None:
        """A new namespace; None without root or iproute2, or if it cannot be created."""
        if shutil.which("ip") is None or os.geteuid() != 0:
            return None
        namespace = Namespace(os.getpid() % 1000)
        name, outer, inner, net = namespace._name, namespace._outer, namespace._inner, namespace._net
        for command in (
            f"netns add {name}",
            f"link add {outer} type veth peer name {inner}",
            f"link set {inner} netns {name}",
            f"addr add {net}.1/24 dev {outer}",
            f"link set {outer} up",
            f"-n {name} addr add {net}.2/24 dev {inner}",
            f"-n {name} link set {inner} up",
            f"-n {name} link set lo up",
        ):
            if not await _ip(command):
                await namespace.__aexit__()
                return None
        return namespace

    async def __aenter__(self) -> Namespace:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _ip(f"link del {self._outer}")
        await _ip(f"netns del {self._name}")

    async def cut(self, lost: bool) -> None:
        """Set the inner end of the link down (``lost``) or up. While it is down, packets are lost without an error."""
        await _ip(f"-n {self._name} link set {self._inner} {'down' if lost else 'up'}")


async def _ip(arguments: str) -> bool:
    process = await asyncio.create_subprocess_exec(
        "ip", *arguments.split(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0
