"""Which opens there is room for, and who comes first where there is too little.

Knows slots, places and the ages of requests; refuses to know passes and tensors. Better not begun than begun and
preempted: whoever is there must have room to grow for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.errors import ContextExceeded, Overloaded
from specdec.core.sequence import SequenceSpec
from specdec.kvcache.prefix_index import TextBlock
from specdec.server.step_loop import Key
from target_service.shared_prefixes import SharedTexts

HEADROOM = 32
"""Tokens that every sequence must have room to grow by, and at least by half of its output, before another is let in:
who has said much has shown that it may say more."""

RETRY_AFTER_S = 0.25
BACK_WITHIN_S = 1.0
"""A refused open that is not back by then, and by the length of a pass later, does not come back."""


@dataclass(slots=True)
class _Refused:
    spec: SequenceSpec
    arrived: float  # when its request did
    seen: float
    slowest_pass_s: float = 0.0  # since then: opens are taken in between passes

    def may_come_back(self, now: float) -> bool:
        return now - self.seen <= BACK_WITHIN_S + self.slowest_pass_s


@dataclass(slots=True)
class _Admitted:
    ids: Sequence[int]  # prompt + committed, as they grow
    num_prompt_tokens: int
    num_shareable: int
    last_block: TextBlock

    @property
    def foreseen(self) -> int:
        """KV slots it is expected to need for a while, beside those that are counted with what is shared."""
        return _foreseen(len(self.ids), self.num_prompt_tokens) - self.num_shareable


class Admission:
    """Of at most ``max_sequences``; see SharedTexts for ``block_size``. Times are those of any one clock, in seconds.

    A refused open leaves nothing at its caller but the wish to try again. If the room went to whoever asks when some is
    free, many small requests would take it, bit by bit, before there is ever enough for a large one. So the open of the
    oldest request that was refused is kept in mind as long as it keeps coming back: whose request is younger is let in
    only if there is room for both.
    """

    def __init__(self, max_sequences: int, block_size: int = 0) -> None:
        self._max_sequences = max_sequences
        self._texts = SharedTexts(block_size)
        self._admitted: dict[Key, _Admitted] = {}
        self._refused: _Refused | None = None  # of the oldest request

    def check(self, spec: SequenceSpec, arrived: float, now: float, num_slots: int) -> None:
        """Raises Overloaded if the sequence must wait, ContextExceeded if waiting would not help.

        ``arrived``: when its request did, about; ``num_slots``: of the KV cache in all, 0 if it has no bounds.
        """
        if num_slots and len(spec.token_ids) >= num_slots:
            raise ContextExceeded(f"{len(spec.token_ids)} token ids do not fit a KV cache of {num_slots} slots")
        if self._refused is not None and not self._refused.may_come_back(now):
            self._refused = None
        before = self._refused
        again = before is not None and before.spec == spec
        if before is None or again or arrived < before.arrived:
            if lacking := self._lacking([spec], num_slots):
                # What it says of its age does not count the time that it waited here for a pass to end.
                arrived = min(arrived, before.arrived) if before is not None and again else arrived
                self._refused = _Refused(spec, arrived, now)
                raise Overloaded(lacking, RETRY_AFTER_S)
        elif lacking := self._lacking([before.spec, spec], num_slots):
            raise Overloaded(f"{lacking}, with an older request that waits for them", RETRY_AFTER_S)

    def enter(self, key: Key, spec: SequenceSpec, ids: Sequence[int]) -> None:
        """It was let in. ``ids`` are its committed ones: more of them as time goes by."""
        shareable, last = self._texts.in_full_blocks(spec), self._texts.add(spec)
        self._admitted[key] = _Admitted(ids, spec.num_prompt_tokens, shareable, last)
        if self._refused is not None and self._refused.spec == spec:
            self._refused = None

    def leave(self, key: Key) -> None:
        """Unknown keys are ignored."""
        if (gone := self._admitted.pop(key, None)) is not None:
            self._texts.remove(gone.last_block)

    def passed(self, seconds: float) -> None:
        """A pass took so long."""
        if self._refused is not None:
            self._refused.slowest_pass_s = max(self._refused.slowest_pass_s, seconds)

    def _lacking(self, specs: Sequence[SequenceSpec], num_slots: int) -> str:
        """Of what there is too little for ``specs`` beside those who are there; empty: of nothing."""
        if len(self._admitted) + len(specs) > self._max_sequences:
            return f"{len(self._admitted)} sequences are open"
        if not num_slots or len(self._admitted) + len(specs) == 1:  # who is alone has all the room there is
            return ""
        taken = self._texts.num_ids + sum(each.foreseen for each in self._admitted.values())
        wanted = sum(
            _foreseen(len(spec.token_ids), spec.num_prompt_tokens) - self._texts.in_full_blocks(spec) for spec in specs
        )
        if taken + wanted <= num_slots:  # texts are not compared where it is full anyway
            wanted += sum(self._texts.missing(spec) for spec in specs)
        return f"{taken} of {num_slots} KV slots are spoken for" if taken + wanted > num_slots else ""


def _foreseen(base: int, num_prompt_tokens: int) -> int:
    return base + max(HEADROOM, (base - num_prompt_tokens) // 2)
