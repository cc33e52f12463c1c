"""Admission of opens, by the KV slots and sequences that are free, and the order of opens that must wait.

Knows slots, sequence limits and the ages of requests; does not know passes and tensors. A late start costs less than a
preemption, so every open sequence keeps room to grow for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.errors import ContextExceeded, Overloaded
from specdec.core.sequence import SequenceSpec
from specdec.server.step_loop import Key
from target_service.shared_prefixes import Run, SharedTexts

HEADROOM = 32
"""Tokens. Before another sequence is admitted, each open one must have room for this many, and for half of its output
so far if that is more: a long output is likely to become longer."""

RETRY_AFTER_S = 0.25
BACK_WITHIN_S = 1.0
"""A refused open that does not return within this time plus the length of a pass is given up."""


@dataclass(slots=True)
class _Refused:
    spec: SequenceSpec
    arrived: float  # arrival time of its request
    seen: float
    slowest_pass_s: float = 0.0  # since ``seen``: opens are handled between passes

    def may_come_back(self, now: float) -> bool:
        return now - self.seen <= BACK_WITHIN_S + self.slowest_pass_s


@dataclass(slots=True)
class _Admitted:
    ids: Sequence[int]  # prompt + committed, as they grow
    num_prompt_tokens: int
    num_shareable: int
    last_run: Run

    @property
    def num_expected(self) -> int:
        """KV slots that it is expected to need for a while, without the shareable ones, which SharedTexts counts."""
        return _num_expected(len(self.ids), self.num_prompt_tokens) - self.num_shareable


class Admission:
    """Admits at most ``max_sequences``; see SharedTexts for ``block_size``. Times are in seconds of any one clock.

    If free room went to the next open that asks, many small requests would take it before there is ever enough for a
    large one. So the oldest refused request is remembered as long as it keeps returning, and a younger request is
    admitted only if there is room for both.
    """

    def __init__(self, max_sequences: int, block_size: int = 0) -> None:
        self._max_sequences = max_sequences
        self._texts = SharedTexts(block_size)
        self._admitted: dict[Key, _Admitted] = {}
        self._refused: _Refused | None = None  # the oldest refused request

    def check(self, spec: SequenceSpec, arrived: float, now: float, num_slots: int) -> None:
        """Raises Overloaded if the sequence must wait, ContextExceeded if waiting would not help.

        ``arrived``: the approximate arrival time of the request; ``num_slots``: size of the KV cache, 0 if unbounded.
        """
        if num_slots and len(spec.token_ids) >= num_slots:
            raise ContextExceeded(
                f"This model's maximum context length is {num_slots} tokens here, as its KV cache has no more slots. "
                f"However, there are {len(spec.token_ids)} token ids."
            )
        if self._refused is not None and not self._refused.may_come_back(now):
            self._refused = None
        before = self._refused
        again = before is not None and before.spec == spec
        if before is None or again or arrived < before.arrived:
            if lacking := self._lacking([spec], num_slots):
                # The age that a retry states leaves out the time that it waited here for a pass to end.
                arrived = min(arrived, before.arrived) if before is not None and again else arrived
                self._refused = _Refused(spec, arrived, now)
                raise Overloaded(lacking, RETRY_AFTER_S)
        elif lacking := self._lacking([before.spec, spec], num_slots):
            raise Overloaded(f"{lacking}, with an older request that waits for them", RETRY_AFTER_S)

    def enter(self, key: Key, spec: SequenceSpec, ids: Sequence[int]) -> None:
        """The sequence was admitted. ``ids`` are its committed ids, a list that grows."""
        shareable, last = self._texts.in_full_blocks(spec), self._texts.add(spec)
        self._admitted[key] = _Admitted(ids, spec.num_prompt_tokens, num_shareable=shareable, last_run=last)
        if self._refused is not None and self._refused.spec == spec:
            self._refused = None

    def leave(self, key: Key) -> None:
        """The sequence was closed. Unknown keys are ignored."""
        if (admitted := self._admitted.pop(key, None)) is not None:
            self._texts.remove(admitted.last_run)

    def passed(self, seconds: float) -> None:
        """A pass took this long."""
        if self._refused is not None:
            self._refused.slowest_pass_s = max(self._refused.slowest_pass_s, seconds)

    def _lacking(self, specs: Sequence[SequenceSpec], num_slots: int) -> str:
        """Which resource is too small for ``specs`` in addition to the admitted sequences, in words; empty: none."""
        if len(self._admitted) + len(specs) > self._max_sequences:
            return f"{len(self._admitted)} sequences are open"
        if not num_slots or len(self._admitted) + len(specs) == 1:  # a single sequence may have all slots
            return ""
        taken = self._texts.num_ids + sum(admitted.num_expected for admitted in self._admitted.values())
        wanted = sum(
            _num_expected(len(spec.token_ids), spec.num_prompt_tokens) - self._texts.in_full_blocks(spec)
            for spec in specs
        )
        if taken + wanted <= num_slots:  # texts are compared only if that can matter
            wanted += sum(self._texts.missing(spec) for spec in specs)
        return f"{taken} of {num_slots} KV slots are reserved" if taken + wanted > num_slots else ""


def _num_expected(base: int, num_prompt_tokens: int) -> int:
    return base + max(HEADROOM, (base - num_prompt_tokens) // 2)
