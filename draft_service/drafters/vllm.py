"""A language model in vLLM as the drafter: it proposes chains, a token per pass.

Knows sequences and chains; does not know sampling (draft_service.drafters.vllm_sampler).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draft_service.drafter import DraftSequence, Node
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.rounds import CACHE_SALT, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.vllm.passes import Outcome

if TYPE_CHECKING:
    from specdec.vllm.engine import VllmEngine

SAMPLER = "draft_service.drafters.vllm_sampler:DraftSampler"


@dataclass(slots=True)
class _Memory:
    spec: SequenceSpec  # without ids
    key: str = ""  # empty: unknown to vLLM
    num_known: int = 0  # committed ids that vLLM has, at least
    place: tuple[int, tuple[int, ...]] | None = None  # base and chain of the last proposal
    proposal: tuple[Node, ...] = ()


class VllmDrafter:
    """See draft_service.drafter.Drafter. ``engine`` must not cache prefixes: drafts are taken back."""

    def __init__(self, engine: VllmEngine, info: ModelInfo) -> None:
        self._engine = engine
        self.info = dataclasses.replace(info, capabilities=(*info.capabilities, CACHE_SALT))

    def open(self, spec: SequenceSpec) -> _Memory:
        return _Memory(dataclasses.replace(spec, token_ids=()))

    def close(self, memory: _Memory) -> None:
        if memory.key:
            self._engine.remove(memory.key)

    def request_yield(self, requested: bool) -> None:
        pass  # a pass is one token

    def cache_use(self) -> tuple[int, int]:
        return self._engine.cache_use()

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        texts = [dataclasses.replace(sequence, tree=sequence.tree.prefix(0)) for sequence in sequences]
        return [found if isinstance(found, SpecdecError) else found is not None for found in self.grow(texts)]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        lacking = {
            index: self._lacking(sequence)
            for index, sequence in enumerate(sequences)
            if sequence.memory.place != (sequence.base, sequence.tree.token_ids)
        }
        chains = {sequences[index].memory.key: chain[: self._engine.max_chain] for index, chain in lacking.items()}
        bases = {sequences[index].memory.key: sequences[index].base for index in lacking}
        outcomes = self._engine.run(chains, bases)[0] if chains else {}
        grown: list[Sequence[Node] | SpecdecError | None] = []
        for index, sequence in enumerate(sequences):
            memory: _Memory = sequence.memory
            outcome = outcomes.get(memory.key)
            grown.append(memory.proposal if outcome is None else _grown(sequence, lacking[index], outcome))
        return grown

    def _lacking(self, sequence: DraftSequence) -> list[int]:
        """What vLLM's text of this sequence lacks, after what it has too much is taken back."""
        memory: _Memory = sequence.memory
        text = [*sequence.ids[memory.num_known :], *sequence.tree.token_ids]
        if not memory.key:
            memory.key = self._engine.add(text, memory.spec.cache_salt, memory.spec)
            chain: list[int] = []
        else:
            chain = self._engine.follow(memory.key, memory.num_known, text)
        memory.place = None
        return chain


def _grown(sequence: DraftSequence, lacking: Sequence[int], outcome: Outcome) -> Sequence[Node] | SpecdecError | None:
    """The proposal, if the pass has taken in all of the text; None: that takes another one."""
    memory: _Memory = sequence.memory
    if outcome.no_memory:
        return Overloaded("no KV blocks are free")
    if outcome.tokens is None or 0 < len(outcome.tokens) <= len(lacking):
        return None
    memory.num_known, memory.place = sequence.base, (sequence.base, sequence.tree.token_ids)
    memory.proposal = (outcome.extra,) if outcome.tokens else ()
    return memory.proposal
