"""The sequences in a pass that has no room for all that wait.

More urgent sequences come first, batch requests last, but what has waited for long is urgent. Within a priority the
streams, one for each orchestrator, take turns by rows, however many sequences they have (fair queueing; Shreedhar,
Varghese: Efficient fair queuing using deficit round robin, 1996). Within a stream, those that were taken go to the end
of the line. Knows rows; does not know what a row is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest
from typing import Any, NamedTuple

from specdec.core.sequence import Priority
from specdec.server.step_loop import Key

AGED_S, _MAX_AGED = 5.0, 4
"""A sequence that waits for a pass for so long is urgent, whatever its priority: none starves. But only so many at a
time, since the others would wait for all of them together."""


class Wait(NamedTuple):
    """A sequence that waits for a pass: its rows, its priority, and for how long (seconds)."""

    rows: int
    priority: Priority = Priority.STANDARD
    waited_s: float = 0.0


def always(_: Key) -> bool:
    return True


class Turns:
    """The turns of one engine's sequences. ``line`` is a dictionary of theirs, which it keeps in order."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # rows by stream, since these streams wait

    def take(
        self,
        line: dict[Key, Any],
        waits: Mapping[Key, Wait],
        max_rows: int,
        affords: Callable[[Key], bool] = always,
    ) -> list[Key]:
        """The sequences of the next pass, one at least, with ``max_rows`` at most unless the first has more.

        ``affords`` is asked for each batch sequence that would join others; False: neither it nor any after it does.
        """
        aged = (key for key, wait in waits.items() if wait.waited_s > AGED_S)
        urgent = nlargest(_MAX_AGED, aged, key=lambda key: waits[key].waited_s)
        classes: dict[Priority, dict[Key, int]] = {}
        for key in line:
            if (wait := waits.get(key)) is not None:
                rank = Priority.INTERACTIVE if key in urgent else wait.priority
                classes.setdefault(rank, {})[key] = wait.rows
        taken: list[Key] = []
        left = max_rows
        for rank in sorted(classes):
            may_join = affords if taken and rank is Priority.BATCH else always
            turn = list(self._in_turn(classes[rank], left, exceeds=not taken, may_join=may_join))
            if all_there := len(turn) == len(classes[rank]):
                left -= sum(classes[rank].values())
            else:
                for key in turn:
                    line[key] = line.pop(key)
            taken += turn
            if not all_there:
                break
        return taken

    def _in_turn(
        self, sizes: Mapping[Key, int], room: int, *, exceeds: bool, may_join: Callable[[Key], bool]
    ) -> Iterator[Key]:
        """``exceeds``: the first one has room whatever its size."""
        if may_join is always and sum(sizes.values()) <= room:
            yield from sizes
            return
        queues: dict[int, deque[Key]] = {}
        for key in sizes:
            queues.setdefault(key.stream, deque()).append(key)
        # A stream that comes back has saved nothing.
        start = min((self._used[stream] for stream in queues if stream in self._used), default=0)
        self._used = {stream: self._used.get(stream, start) for stream in queues}
        while queues:
            stream = min(queues, key=self._used.__getitem__)
            key = queues[stream][0]
            if (sizes[key] > room and not exceeds) or not may_join(key):
                return
            queues[stream].popleft()
            if not queues[stream]:
                del queues[stream]
            room, exceeds = room - sizes[key], False
            self._used[stream] += sizes[key]
            yield key
