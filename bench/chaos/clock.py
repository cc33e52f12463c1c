"""A wall clock that can jump, for processes that preload clock.c. Needs a C compiler; knows no services."""

from __future__ import annotations

import asyncio
import shutil
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


class Clock:
    """The wall clock of processes with ``prefix``. Their monotonic clock does not jump, as on a real machine."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="clock-")
        self._library, self._file = (Path(self._directory.name) / name for name in ("clock.so", "ahead"))
        self.jump(0)
        self.prefix: Sequence[str] = ("env", f"LD_PRELOAD={self._library}", f"CLOCK_FILE={self._file}")

    @staticmethod
    async def create() -> Clock | None:
        """A clock; None without a C compiler."""
        if (compiler := shutil.which("cc")) is None:
            return None
        clock = Clock()
        source = str(Path(__file__).with_name("clock.c"))
        process = await asyncio.create_subprocess_exec(
            compiler, "-O2", "-shared", "-fPIC", "-o", str(clock._library), source
        )
        return None if await process.wait() else clock

    def jump(self, seconds: int) -> None:
        """Set the clock ``seconds`` ahead of the right time."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # in place: processes map this file
            file.write(struct.pack("=q", seconds))

    async def ahead_s(self) -> float:
        """Seconds by which the clock is ahead, as a process sees it."""
        process = await asyncio.create_subprocess_exec(*self.prefix, "date", "+%s.%N", stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        return float(said) - time.time()
