"""The log of a model service's passes: start, end and rows of each, in a file that another process reads.

Times are those of the machine's monotonic clock, which all processes share. Knows only numbers.
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
    """Append a pass. ``file`` is unbuffered, so a record is one write, a few microseconds after its pass."""
    file.write(_RECORD.pack(each.start, each.end, each.rows))


def read_passes(file: Path, since: float = 0.0) -> list[Pass]:
    """The passes that began at ``since`` or later, in order. An incomplete last record is left out."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = len(content) - len(content) % _RECORD.size
    passes = [Pass(*record) for record in _RECORD.iter_unpack(content[:whole])]
    return [each for each in passes if each.start >= since]


def busy_s(passes: Iterable[Pass], start: float, end: float) -> float:
    """Seconds between ``start`` and ``end`` that at least one pass covers."""
    covered, at = 0.0, start
    for each in sorted(passes, key=lambda each: each.start):
        covered += max(0.0, min(each.end, end) - max(each.start, at))
        at = max(at, min(each.end, end))
    return covered


now = time.perf_counter
