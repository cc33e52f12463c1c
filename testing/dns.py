"""A DNS server, and a command prefix that makes it a process's only resolver. Needs root; knows no services."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from enum import Enum, auto

_PORT = 53
_A, _IN = 1, 1
_POINTER_TO_QUESTION = 0xC00C
_RESPONSE, _UNKNOWN, _FAILED = 0x8400, 3, 2


class Mood(Enum):
    """How the server reacts to queries."""

    ANSWERS = auto()
    FAILS = auto()  # SERVFAIL
    IS_SILENT = auto()  # a resolver waits 10 s for an answer


class Names(asyncio.DatagramProtocol):
    """The DNS server. ``addresses`` has the IPv4 addresses of each name; processes with ``prefix`` use no other
    resolver. They may use all addresses of ``network``, a /24 of loopback, except that of the server."""

    def __init__(self, addresses: dict[str, list[str]]) -> None:
        self.addresses = addresses
        self.mood = Mood.ANSWERS
        self.num_unanswered = 0
        # By process id, so that concurrent runs do not collide.
        self.network = f"127.{220 + os.getpid() % 30}.{os.getpid() // 30 % 250}"
        self._file = tempfile.NamedTemporaryFile("w", prefix="resolv-", suffix=".conf")  # noqa: SIM115
        self._file.write(f"nameserver {self.network}.{_PORT}\n")
        self._file.flush()
        self._transport: asyncio.DatagramTransport | None = None
        self.prefix: Sequence[str] = (
            *("unshare", "--mount", "sh", "-c"),
            f'mount --bind {self._file.name} /etc/resolv.conf && exec "$@"',
            "sh",
        )

    @staticmethod
    async def create(addresses: dict[str, list[str]]) -> Names | None:
        """A server, not yet started; None where the process may not unshare mount namespaces."""
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            return None
        names = Names(addresses)
        process = await asyncio.create_subprocess_exec(*names.prefix, "true", stderr=asyncio.subprocess.DEVNULL)
        return None if await process.wait() else names

    async def __aenter__(self) -> Names:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, (f"{self.network}.{_PORT}", _PORT))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()
        self._file.close()

    def datagram_received(self, data: bytes, sender: tuple[str | int, ...]) -> None:
        if self.mood is not Mood.ANSWERS:
            self.num_unanswered += 1
        if self.mood is not Mood.IS_SILENT and self._transport is not None:
            answer = self._answer(data) if self.mood is Mood.ANSWERS else _reply(data, _FAILED)
            with contextlib.suppress(OSError):
                self._transport.sendto(answer, sender)

    def _answer(self, data: bytes) -> bytes:
        name, kind = _question(data)
        if name not in self.addresses:
            return _reply(data, _UNKNOWN)
        return _reply(data, 0, self.addresses[name] if kind == _A else [])


def _question(data: bytes) -> tuple[str, int]:
    """The queried name and the record type."""
    labels, at = [], 12
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), struct.unpack_from(">H", data, at + 1)[0]


def _reply(data: bytes, status: int, addresses: Sequence[str] = ()) -> bytes:
    """The reply to a message with one question, without its additional records (EDNS). RFC 1035, section 4."""
    question = data[12 : data.index(0, 12) + 5]
    header = struct.pack(">2s5H", data[:2], _RESPONSE | status, 1, len(addresses), 0, 0)
    records = (
        struct.pack(">HHHIH4s", _POINTER_TO_QUESTION, _A, _IN, 0, 4, ipaddress.IPv4Address(address).packed)
        for address in addresses
    )
    return header + question + b"".join(records)
