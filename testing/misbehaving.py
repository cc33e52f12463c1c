"""A model that misbehaves on command: it waits at a gate, fails, preempts, answers by a script, and records passes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree
from testing.patience import PATIENCE_S

MODELS_OWN = object()
"""What ``instead`` returns for an entry that the model itself answers."""


class Misbehaving:
    """Around a verifier or a drafter. Commands are attributes, which may change while the model serves.

    An entry of a pass is a verifier's job or a drafter's sequence. Passes of a drafter are those of ``grow``.
    """

    def __init__(
        self,
        model: Any,
        *,
        closes_at: int | None = None,
        closes_on: int | None = None,
        pass_s: float = 0.0,
        records: bool = False,
    ) -> None:
        """The gate closes itself before pass ``closes_at`` (the first is 1), and before one with the token
        ``closes_on``. Every pass takes ``pass_s`` longer."""
        self._model = model
        self.info = model.info
        self.gate, self.entered = threading.Event(), threading.Event()  # entered: a pass found the gate closed
        self.gate.set()
        self.closes_at, self.closes_on, self.pass_s = closes_at, closes_on, pass_s
        self.error: BaseException | None = None
        """Every pass raises it."""
        self.to_fail = 0
        """So many of the next passes raise."""
        self.instead: Callable[[Any], Any] = self._scripted
        """The outcome of an entry, or MODELS_OWN."""
        self._scripts: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        self._live: list[tuple[Any, SequenceSpec]] = []
        self._records = records
        self.passes: list[list[tuple[list[int], TokenTree]]] = []
        """Of each pass the committed ids and the tree of every entry, if it ``records``."""
        self.learnt: list[list[list[int]]] = []
        """Of each ``learn`` the committed ids."""
        self.num_passes = self.num_opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def live(self) -> list[Sequence[int]]:
        """The texts that open sequences were opened with."""
        return [spec.token_ids for _, spec in self._live]

    def script(self, prefix: Sequence[int], *outcomes: Any) -> None:
        """In the next passes the first text that begins with ``prefix`` gets these outcomes, one in each."""
        self._scripts[tuple(prefix)] += outcomes

    async def in_a_pass(self) -> None:
        """Returns once a pass waits at the gate."""
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)

    def open(self, spec: SequenceSpec) -> Any:
        memory = self._model.open(spec) or object()  # a table's drafter has none
        self._live.append((memory, spec))
        self.num_opened += 1
        return memory

    def close(self, memory: Any) -> None:
        self._live = [each for each in self._live if each[0] is not memory]
        self._model.close(memory)

    def verify(self, jobs: Sequence[Any]) -> Any:
        outcomes, left = self._pass(jobs)
        decisions, timings = self._model.verify(left)
        return _filled(outcomes, decisions), timings

    def grow(self, sequences: Sequence[Any]) -> Any:
        outcomes, left = self._pass(sequences)
        return _filled(outcomes, self._model.grow(left) if left else [])

    def learn(self, sequences: Sequence[Any]) -> Any:
        self.learnt.append([list(each.ids) for each in sequences])
        return self._model.learn(sequences)

    def _pass(self, entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outcomes that are not the model's, and the entries left to it."""
        self.num_passes += 1
        if self._records:
            self.passes.append([(list(each.ids), each.tree) for each in entries])
        closing = self.closes_on is not None and any(self.closes_on in each.ids for each in entries)
        if closing or self.num_passes == self.closes_at:
            self.gate.clear()
        if not self.gate.is_set():
            self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        time.sleep(self.pass_s)
        if self.to_fail:
            self.to_fail -= 1
            raise RuntimeError("planted")
        if self.error is not None:
            raise self.error
        self._due = {prefix for prefix, outcomes in self._scripts.items() if outcomes}
        outcomes = [self.instead(each) for each in entries]
        return outcomes, [each for each, outcome in zip(entries, outcomes, strict=True) if outcome is MODELS_OWN]

    def _scripted(self, entry: Any) -> Any:
        for prefix in self._due:
            if tuple(entry.ids[: len(prefix)]) == prefix:
                self._due.remove(prefix)
                return self._scripts[prefix].pop(0)
        return MODELS_OWN


def _filled(outcomes: list[Any], of_model: Sequence[Any]) -> list[Any]:
    left = iter(of_model)
    return [next(left) if outcome is MODELS_OWN else outcome for outcome in outcomes]
