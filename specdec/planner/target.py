"""A simulated target: waiting sequences join the next pass, which may begin after a batching delay.

Knows rows; does not know verdicts. The counterpart of specdec/server/step_loop.py and target_service/engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.limits import MAX_TREE_ROWS, chunked
from specdec.passes.prefill import fair_share
from specdec.planner.events import Events
from specdec.planner.pass_time import PassTime
from specdec.planner.request import Request
from specdec.server.batch_delay import BatchDelay


class Target:
    """A target. Its answers reach the orchestrator after another ``way_s`` seconds."""

    def __init__(self, events: Events, pass_time: PassTime, way_s: float) -> None:
        self.live = 0
        self.busy_s = 0.0
        self.num_passes = self.num_rows = 0
        self._events = events
        self._pass_time = pass_time
        self._chunk = pass_time.chunk()
        self._way_s = way_s
        self._waiting: list[Request] = []
        self._batch_delay = BatchDelay()
        self._busy = False
        self._rest = 0  # number of the latest batching delay; the end of an earlier one is ignored

    def receive(self, requests: Sequence[Request]) -> None:
        """Receive a frame of opens and rounds."""
        for request in requests:
            if not request.unfed:
                self._batch_delay.returned(request, self._events.now)
        self._waiting.extend(requests)
        self._look()

    def close(self, request: Request) -> None:
        self._batch_delay.removed(request)
        self._look()

    def _rested(self, rest: int) -> None:
        if rest == self._rest:
            self._look()

    def _look(self) -> None:
        """Begin a pass or a batching delay if the target is idle and requests wait."""
        if self._busy or not self._waiting:
            return
        self._rest += 1
        num_here = len(self._waiting)
        delay_s = self._batch_delay.delay_s(num_here, num_here, self._events.now)
        if delay_s:
            self._events.after(delay_s, self._rested, self._rest)
        else:
            self._begin()

    def _begin(self) -> None:
        turn = chunked([1 + request.flying for request in self._waiting], MAX_TREE_ROWS)[0]
        batch, self._waiting = self._waiting[: turn.stop], self._waiting[turn.stop :]
        self._busy = True
        prompts = [request for request in batch if request.unfed]
        rows = len(batch) - len(prompts)
        for request in batch:
            rows += request.flying
        if prompts:
            most = fair_share([request.unfed for request in prompts], self._chunk.rows)
            for request in prompts:
                fed = min(request.unfed, most)
                request.unfed -= fed
                rows += fed
        seconds = self._pass_time.seconds(rows)
        self.busy_s += seconds
        self.num_passes += 1
        self.num_rows += rows
        self._batch_delay.observe_pass(rows, seconds)
        self._chunk.observe(rows, seconds)
        self._events.after(seconds, self._end, batch)

    def _end(self, batch: list[Request]) -> None:
        frames: dict[int, list[Request]] = {}
        for request in batch:
            if request.unfed:
                self._waiting.append(request)
            else:
                frames.setdefault(id(request.orchestrator), []).append(request)
                if request.run_on:
                    request.run_on -= 1
                    self._waiting.append(request)
                else:
                    self._batch_delay.left(request, self._events.now)
        for frame in frames.values():
            orchestrator = frame[0].orchestrator
            assert orchestrator is not None, "a request has an orchestrator"
            self._events.after(self._way_s, orchestrator.verdicts, frame)
        self._busy = False
        self._look()
