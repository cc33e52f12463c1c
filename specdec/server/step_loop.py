"""The step loop: a dedicated thread that owns a model and serves any number of streams (continuous batching).

Knows when a pass runs and which sequences wait for it; does not know what a pass computes or how streams are written.
Work that arrives during a pass joins the next one, which an engine may delay for a moment.
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
    """Identifies a sequence of a stream."""

    stream: int
    sequence: int


def noop() -> None:
    """Do nothing."""


Results = Sequence[tuple[Key, Any]]
"""Results of a pass: a Verdict, a Growth, or the SpecdecError that ended the sequence."""


class Engine(Protocol):
    """A model and its sequences. Only the step loop's thread calls its methods, so they need no locks.

    Opens and entries are values that the service's codec has read. ``open`` and ``submit`` may raise a SpecdecError,
    which ends that sequence; so does a SpecdecError among the results of ``step``.
    """

    def open(self, key: Key, open_: Any) -> None: ...

    def submit(self, key: Key, entry: Any, arrived: float | None = None) -> None:
        """``arrived``: time of arrival (time.perf_counter), which may be before the last pass; None: now."""

    def close(self, key: Key) -> None:
        """Release all memory of the sequence at once. Unknown keys are ignored."""

    def pause(self, stream: int, paused: bool) -> None:
        """Apply backpressure: while ``paused``, compute only unanswered entries for the stream's sequences."""

    def drain(self) -> None:
        """From now on, refuse opens, and end a sequence with Draining once it has no unanswered entry."""

    @property
    def idle(self) -> bool: ...

    @property
    def batch_delay_s(self) -> float:
        """The batching delay: seconds for which the next pass should wait for more orders; 0 for none."""

    def step(self, poll: Callable[[], None] = noop) -> Results:
        """Run one pass for all waiting sequences. Before it returns, an engine may call ``poll``, which carries out
        the orders that came during the pass. Raises only if nothing could be computed for any of the sequences."""

    def request_yield(self, requested: bool) -> None:
        """Set whether the engine should yield soon, because orders wait. From any thread, also during ``step``."""

    def working_on(self) -> Sequence[Key]:
        """The sequences of the current pass, which are lost if it raises."""

    @property
    def load(self) -> Load:
        """The current load. May be read from any thread; its numbers may stem from different passes."""


_Order = tuple[Callable[..., None], tuple[object, ...]]


class StepLoop:
    """Runs an engine on its own thread and passes the results of each pass to ``deliver`` on the event loop.

    Create and use it on the event loop. Orders (open, submit, close, pause, drain) take effect together at the next
    ``post``: no pass begins between them. Orders posted during a pass may take effect before its results are delivered.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Results], None], name: str) -> None:
        self.engine = engine
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._orders: list[_Order] = []
        # Implemented in C. A condition variable, which is Python code, costs several times as much per pass.
        self._inbox: queue.SimpleQueue[list[_Order]] = queue.SimpleQueue()
        self._stopping = False
        self.busy_since: float | None = None  # start of the current pass; None while the thread waits for orders
        self.failed_in_a_row = 0  # passes that raised since the last successful one
        self.busy_s = 0.0  # total working time of the model thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def open(self, key: Key, open_: object) -> None:
        self._orders.append((self._guarded, (self.engine.open, key, open_)))

    def submit(self, key: Key, entry: object) -> None:
        submit = partial(self.engine.submit, arrived=time.perf_counter())
        self._orders.append((self._guarded, (submit, key, entry)))

    def close(self, key: Key) -> None:
        self._orders.append((self._close, (key,)))

    def pause(self, stream: int, paused: bool) -> None:
        self._orders.append((self.engine.pause, (stream, paused)))

    def drain(self) -> None:
        self._orders.append((self.engine.drain, ()))

    def post(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            self._inbox.put(orders)
            self.engine.request_yield(True)

    @property
    def died(self) -> bool:
        """Whether the thread has ended without ``stop``."""
        return not self._stopping and not self._thread.is_alive()

    async def stop(self) -> None:
        """Finish the current pass, carry out posted orders, and end the thread."""
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
            log.exception("a sequence could not be accepted; it is returned for replay")
            self._close(key)
            self._hand_over([(key, PassFailed("the model failed on this sequence"))])

    def _close(self, key: Key) -> None:
        try:
            self.engine.close(key)
        except Exception:
            log.exception("the memory of a sequence could not be released")

    def _hand_over(self, results: Results) -> None:
        # At interpreter exit the event loop may be closed, and no caller waits for results.
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
            # Cleared before the inbox is read, so that orders which come later request a yield again.
            self.engine.request_yield(self._stopping)
            self._carry_out_posted()
            batch_delay_s = self._batch_delay_s()
            if batch_delay_s and not self.engine.idle:
                self.busy_since = None
                with contextlib.suppress(queue.Empty):
                    self._carry_out(self._inbox.get(timeout=batch_delay_s))
                continue
            started = time.perf_counter()
            results = self._step()
            self.busy_s += time.perf_counter() - started
            self._hand_over(results)
        self._carry_out_posted()  # closes sequences, because the model may be used again elsewhere
        self.busy_since = None

    def _batch_delay_s(self) -> float:
        try:
            return self.engine.batch_delay_s
        except Exception:  # a failed optimisation must not end the model's thread
            log.exception("the batching delay could not be computed; the pass begins at once")
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
            # A step without sequences does not prove that the model works.
            if self.failed_in_a_row and self.engine.working_on():
                self.failed_in_a_row = 0
            return results
        except Exception:
            self.failed_in_a_row += 1
            log.exception("a pass failed; its sequences are returned for replay")
            lost = list(self.engine.working_on())
            for key in lost:
                self._close(key)
            return [(key, PassFailed("the pass of this sequence failed")) for key in lost]
