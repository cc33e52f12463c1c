"""The step loop: one dedicated thread that owns a model, fed by any number of streams.

Knows when a pass runs and who waits for it; refuses to know what a pass computes or how a stream is written.
Whatever arrives while the model is busy joins the next pass, which an engine may put off for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from specdec.core.errors import PassFailed, SpecdecError
from specdec.core.rounds import Load

log = logging.getLogger(__name__)


class Key(NamedTuple):
    """A sequence of a stream."""

    stream: int
    sequence: int


def nothing() -> None:
    """There is nothing to look for."""


Results = Sequence[tuple[Key, Any]]
"""What a pass answers: a Verdict, a Growth or the SpecdecError that ended the sequence."""


class Engine(Protocol):
    """A model and its sequences. Only the step loop's thread calls the verbs, so they need no locks.

    Opens and entries are what the service's codec reads from the wire. ``open`` and ``submit`` raise
    SpecdecError, which ends that sequence; so does a SpecdecError among the results of ``step``.
    """

    def open(self, key: Key, open_: Any) -> None: ...

    def submit(self, key: Key, entry: Any, arrived: float | None = None) -> None:
        """``arrived``: when it was here, which may be a pass ago (time.perf_counter); None: now."""

    def close(self, key: Key) -> None:
        """Release everything of the sequence at once. Unknown keys are ignored."""

    def hold(self, stream: int, held: bool) -> None:
        """While it is held, compute nothing for this stream's sequences but what they wait for."""

    def drain(self) -> None:
        """From now on refuse opens and end sequences with Draining when nothing of theirs is unanswered."""

    @property
    def idle(self) -> bool: ...

    @property
    def rest_s(self) -> float:
        """How long the next pass had better wait for more orders, where it need not: 0 is not at all."""

    def step(self, look: Callable[[], None] = nothing) -> Results:
        """One pass for everything that waits. Before it says what came of it an engine may ``look`` what was ordered
        meanwhile, which is then carried out."""

    def request_yield(self, requested: bool) -> None:
        """Whether orders have come that had better be carried out soon. From any thread, also during ``step``."""

    def working_on(self) -> Sequence[Key]:
        """The sequences of the pass at hand: they are lost if it raises."""

    @property
    def load(self) -> Load:
        """May be read from any thread; its numbers may be of neighbouring passes."""


_Order = tuple[Callable[..., None], tuple[object, ...]]


class StepLoop:
    """Runs an engine on its own thread and hands what it answers to ``deliver`` on the event loop, per pass.

    Create and use it on the event loop. Orders (open, submit, close, hold, drain) take effect together at the next
    ``post``: no pass begins between them. Those that come during a pass may take effect before its results are told.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Results], None], name: str) -> None:
        self.engine = engine
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._orders: list[_Order] = []
        # A queue in C: a condition variable, which is Python, costs several times as much in every pass.
        self._inbox: queue.SimpleQueue[list[_Order]] = queue.SimpleQueue()
        self._stopping = False
        self.busy_since: float | None = None  # when the pass at hand began; None: the thread waits for orders
        self.failed_in_a_row = 0  # passes that raised since one was made
        self.busy_s = 0.0  # of the model thread, so far
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def open(self, key: Key, open_: object) -> None:
        self._orders.append((self._guarded, (self.engine.open, key, open_)))

    def submit(self, key: Key, entry: object) -> None:
        submit = partial(self.engine.submit, arrived=time.perf_counter())
        self._orders.append((self._guarded, (submit, key, entry)))

    def close(self, key: Key) -> None:
        self._orders.append((self._close, (key,)))

    def hold(self, stream: int, held: bool) -> None:
        self._orders.append((self.engine.hold, (stream, held)))

    def drain(self) -> None:
        self._orders.append((self.engine.drain, ()))

    def post(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            self._inbox.put(orders)
            self.engine.request_yield(True)

    @property
    def died(self) -> bool:
        """The thread has ended, and nobody told it to."""
        return not self._stopping and not self._thread.is_alive()

    async def stop(self) -> None:
        """Finish the pass at hand, carry out what was posted, and end the thread."""
        self._stopping = True
        self._inbox.put([])
        self.engine.request_yield(True)
        await asyncio.to_thread(self._thread.join)

    def _guarded(self, verb: Callable[[Key, Any], None], key: Key, entry: object) -> None:
        try:
            verb(key, entry)
        except SpecdecError as error:
            self._close(key)
            self._hand_over([(key, error)])
        except Exception:
            log.exception("a sequence could not be taken in; it is given back for replay")
            self._close(key)
            self._hand_over([(key, PassFailed("the model failed on this sequence"))])

    def _close(self, key: Key) -> None:
        try:
            self.engine.close(key)
        except Exception:
            log.exception("the memory of a sequence could not be released")

    def _hand_over(self, results: Results) -> None:
        # The event loop may be gone at interpreter exit; then nobody waits for the answer either.
        if results and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, results)

    def _run(self) -> None:
        while not self._stopping:
            orders = []
            if self.engine.idle:
                self.busy_since = None
                orders = self._inbox.get()
            self.busy_since = time.monotonic()
            self._carry_out(orders)
            # Before it is looked what has come: whatever comes after that is in a hurry again.
            self.engine.request_yield(self._stopping)
            self._carry_out_posted()
            rest_s = self._rest_s()
            if rest_s and not self.engine.idle:
                self.busy_since = None
                with contextlib.suppress(queue.Empty):
                    self._carry_out(self._inbox.get(timeout=rest_s))
                continue
            started = time.perf_counter()
            results = self._step()
            self.busy_s += time.perf_counter() - started
            self._hand_over(results)
        self._carry_out_posted()  # the model may go on to serve elsewhere, and must not hold what nobody has any more
        self.busy_since = None

    def _rest_s(self) -> float:
        try:
            return self.engine.rest_s
        except Exception:  # what only saves time must not cost the model its thread
            log.exception("how long to wait for others could not be told; nobody is waited for")
            return 0.0

    def _carry_out_posted(self) -> None:
        while not self._inbox.empty():
            self._carry_out(self._inbox.get())

    def _carry_out(self, orders: list[_Order]) -> None:
        for verb, arguments in orders:
            verb(*arguments)

    def _step(self) -> Results:
        try:
            results = self.engine.step(self._carry_out_posted)
            # A step for nobody computes nothing, and so proves nothing.
            if self.failed_in_a_row and self.engine.working_on():
                self.failed_in_a_row = 0
            return results
        except Exception:
            self.failed_in_a_row += 1
            log.exception("a pass failed; its sequences are given back for replay")
            lost = list(self.engine.working_on())
            for key in lost:
                self._close(key)
            return [(key, PassFailed("the pass of this sequence failed")) for key in lost]
