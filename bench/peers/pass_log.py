"""When a model service computed: the start, the end and the rows of each pass, in a file that another process reads.

Times are of the machine's monotonic clock, which all processes share. Knows numbers alone.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_RECORD = struct.Struct("<ddi")


@dataclass(frozen=True, slots=True)
class Pass:
    start: float  # seconds
    end: float
    rows: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


def write_pass(file: IO[bytes], each: Pass) -> None:
    """``file`` is open and unbuffered: a record is one write, a few microseconds after its pass."""
    file.write(_RECORD.pack(each.start, each.end, each.rows))


def read_passes(file: Path, since: float = 0.0) -> list[Pass]:
    """Those that began at ``since`` or later, in order."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = len(content) - len(content) % _RECORD.size
    passes = [Pass(*record) for record in _RECORD.iter_unpack(content[:whole])]
    return [each for each in passes if each.start >= since]


def busy_s(passes: Iterable[Pass], start: float, end: float) -> float:
    """How much of the time from start to end any of the passes covers; what two cover counts once."""
    covered, at = 0.0, start
    for each in sorted(passes, key=lambda each: each.start):
        covered += max(0.0, min(each.end, end) - max(each.start, at))
        at = max(at, min(each.end, end))
    return covered


now = time.perf_counter
