"""Draft-Target-Model: a small language model proposes a chain, one token per sequence and pass.

Ahead of the verdict it proposes a tree. Its nodes are fed again in every pass, since a small model's rows cost next to
nothing, and their KV is dropped; what is committed is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from torch import Tensor

from draft_service.drafter import DraftSequence, Node
from draft_service.proposal import propose, propose_children
from specdec.errors import Overloaded, SpecdecError
from specdec.kv_cache import PoolFullError, SequenceCache
from specdec.model_runner import ModelRunner
from specdec.noise_cache import KeptRows
from specdec.packed_rows import Segment
from specdec.prefill import rows_to_feed
from specdec.rounds import AHEAD, CACHE_SALT, SIBLINGS
from specdec.sampling_state import SamplingState
from specdec.sequence import SequenceSpec
from specdec.tree import EMPTY_TREE, ROOT


@dataclass(slots=True)
class _Memory:
    cache: SequenceCache
    sampling: SamplingState
    fed: list[int] = field(default_factory=list)  # the token at each cached position
    num_agreed: int = 0  # of them, so many are known to be the committed ones


class _Text(Sequence[int]):
    """The first ``length`` ids of what was committed and then drafted. No copy: a step must not cost by the context."""

    def __init__(self, committed: list[int], drafted: tuple[int, ...], length: int) -> None:
        self._committed = committed
        self._drafted = drafted
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self[index : index + 1 or None][0]
        start, stop, _ = index.indices(self._length)
        num_committed = len(self._committed)
        found = self._committed[start:stop]
        return (
            found
            if stop <= num_committed
            else [*found, *self._drafted[max(0, start - num_committed) : stop - num_committed]]
        )


class LanguageModelDrafter:
    """See draft_service.drafter.Drafter.

    Rolling back to what was committed and catching up on what was missed are one rule: keep the cache as far as
    it agrees with the text at hand, feed the rest.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._noise = KeptRows()
        self.info = dataclasses.replace(
            runner.info, capabilities=(*runner.info.capabilities, AHEAD, SIBLINGS, CACHE_SALT)
        )

    def open(self, spec: SequenceSpec) -> _Memory:
        return _Memory(self._runner.new_cache(spec.cache_salt), SamplingState(spec, kept=self._noise))

    def close(self, memory: _Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        # All but the root: the first step of growing feeds it and reads its logits.
        limit = self.info.context_length
        texts = {
            index: _Text(sequence.ids, (), max(1, min(sequence.base, limit) - 1))
            for index, sequence in enumerate(sequences)
        }
        # Where all of it is cached already, what was drafted below it stays cached, too.
        missing = {
            index: text for index, text in texts.items() if _num_cached(sequences[index].memory, text) < len(text)
        }
        fed = self._feed([sequences[index] for index in missing], list(missing.values())) if missing else []
        outcome = dict(zip(missing, fed, strict=True))
        return [
            each if isinstance(each, SpecdecError) else each is not None
            for each in (outcome.get(index, True) for index in texts)
        ]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        texts = []
        for sequence in sequences:
            chain = () if sequence.spots else sequence.tree.token_ids
            texts.append(_Text(sequence.ids, chain, sequence.base + len(chain)))
        fed = self._feed(sequences, texts)
        for index, sequence in enumerate(sequences):
            fed[index] = sequence.memory.sampling.take_in(sequence.ids) or fed[index]
        logits = {index: outcome for index, outcome in enumerate(fed) if isinstance(outcome, Tensor)}
        those, rows = [sequences[index] for index in logits], list(logits.values())
        ahead = any(sequence.spots for sequence in those)
        nodes = propose_children(those, rows) if ahead else propose(those, rows)
        grown = dict(zip(logits, nodes, strict=True))
        return [grown[index] if isinstance(outcome, Tensor) else outcome for index, outcome in enumerate(fed)]

    def _feed(self, sequences: Sequence[DraftSequence], texts: Sequence[_Text]) -> list[Tensor | SpecdecError | None]:
        """Bring each cache towards the end of its text; where that is reached, feed the tree of a sequence with spots.

        The logits [1, vocab] after the text, or those of the spots (see propose_children); None: that takes another
        pass; or why it was impossible.
        """
        for sequence, text in zip(sequences, texts, strict=True):
            memory: _Memory = sequence.memory
            _roll_back(memory, sequence, text)
            if len(text) - len(memory.cache) > 1:  # also what another sequence filled while this one waited for it
                self._runner.move(memory.cache.attach(text))
                memory.fed += text[len(memory.fed) : len(memory.cache)]
        caches: list[SequenceCache] = [sequence.memory.cache for sequence in sequences]
        outcome: list[Tensor | SpecdecError | None] = [None] * len(texts)
        segments: dict[int, Segment] = {}
        for index, num_rows in enumerate(rows_to_feed(list(zip(caches, texts, strict=True)))):
            cache, text = caches[index], texts[index]
            num_context = len(cache)
            end = num_context + num_rows
            complete = end == len(text)
            tree = sequences[index].tree if sequences[index].spots and complete else EMPTY_TREE
            try:
                cache.take(num_rows + len(tree))
            except PoolFullError as error:
                outcome[index] = Overloaded(str(error))
                continue
            if num_rows:
                root = num_rows - 1
                segments[index] = Segment(
                    [*text[num_context:end], *tree.token_ids],
                    [*range(-1, root), *(num_rows + parent for parent in tree.parents)],
                    num_context,
                    cache.block_table,
                    [num_rows + node for node in _read_at(sequences[index])] if complete else [],
                    exact=False,
                )
        outputs = self._runner.forward(list(segments.values())) if segments else []
        for (index, segment), output in zip(segments.items(), outputs, strict=True):
            num_kept = min(len(segment.token_ids), len(texts[index]) - segment.num_context)
            caches[index].keep(range(num_kept))
            caches[index].remember(sequences[index].ids)  # what is committed, not what is drafted
            sequences[index].memory.fed.extend(segment.token_ids[:num_kept])
            if segment.logit_rows:
                outcome[index] = output.logits
        return outcome


def _read_at(sequence: DraftSequence) -> list[int]:
    """The nodes after which logits are wanted, ROOT for the end of the text."""
    if not sequence.spots:
        return [ROOT]
    if sequence.memory.sampling.transforms.active:
        return [ROOT, *range(len(sequence.tree))]
    return [spot.parent for spot in sequence.spots]


def _num_cached(memory: _Memory, text: _Text) -> int:
    """How far the cache agrees with the text."""
    limit = min(len(memory.fed), len(text))
    start = min(memory.num_agreed, limit)
    fed, wanted = memory.fed[start:limit], text[start:limit]
    if fed == wanted:
        return limit
    return start + next(i for i, (one, other) in enumerate(zip(fed, wanted, strict=True)) if one != other)


def _roll_back(memory: _Memory, sequence: DraftSequence, text: _Text) -> None:
    """Keep the cache as far as it agrees with the text, but leave something to feed."""
    memory.cache.truncate(min(_num_cached(memory, text), len(text) - 1))
    del memory.fed[len(memory.cache) :]
    memory.num_agreed = min(len(memory.fed), sequence.base)
