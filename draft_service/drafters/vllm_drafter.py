"""A language model in vLLM as the drafter: a pass feeds one path of each tree, and proposes at its end.

Knows sequences and paths; does not know sampling (draft_service.drafters.vllm_sampler).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draft_service.drafter import DraftSequence, Node
from draft_service.drafters.vllm_sampler import Place, Proposal
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import ROOT, TokenTree
from specdec.vllm.passes import Outcome

if TYPE_CHECKING:
    from specdec.vllm.engine import VllmEngine

SAMPLER = "draft_service.drafters.vllm_sampler:DraftSampler"

Path = tuple[int, ...]
"""Tokens from the base to a node."""


@dataclass(slots=True)
class _Memory:
    spec: SequenceSpec  # without ids
    key: str = ""  # empty: unknown to vLLM
    num_known: int = 0  # committed ids that vLLM has, at least
    base: int = 0  # of the proposals
    proposals: dict[Path, Proposal] = field(default_factory=dict)

    def follow(self, sequence: DraftSequence) -> None:
        """Keep the proposals that are still at a possible place. Those that were drawn hold for one base."""
        if sequence.base == self.base:
            return
        committed = tuple(sequence.ids[self.base :]) if self.base else ()
        kept = self.proposals.items() if self.base and self.spec.keyed_by_token else ()
        length = len(committed)
        self.proposals = {path[length:]: found for path, found in kept if path[:length] == committed}
        self.base = sequence.base

    def at(self, path: Path, num_guesses: int) -> Proposal | None:
        found = self.proposals.get(path)
        return found if found is not None and found.num_guesses >= num_guesses else None


class VllmDrafter:
    """See draft_service.drafter.Drafter. ``engine`` must not cache prefixes: drafts are taken back.

    Where a tree is to grow at several places, those with known proposals grow, and the likeliest other one: each
    further path would take a pass of its own.
    """

    def __init__(self, engine: VllmEngine, info: ModelInfo) -> None:
        self._engine = engine
        # What follows a full context can be guessed, but not by vLLM.
        self.info = dataclasses.replace(
            info,
            context_length=info.context_length - 1,
            capabilities=(*info.capabilities, AHEAD, SIBLINGS, CACHE_SALT),
        )

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
        return self._feed(sequences, [()] * len(sequences))

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        for sequence in sequences:
            sequence.memory.follow(sequence)
        fed = self._feed(sequences, list(map(_next_path, sequences)))
        grown: list[Sequence[Node] | SpecdecError | None] = []
        for sequence, outcome in zip(sequences, fed, strict=True):
            grown.append(_nodes(sequence) if outcome is True else outcome or None)
        return grown

    def _feed(self, sequences: Sequence[DraftSequence], paths: Sequence[Path]) -> list[SpecdecError | bool]:
        """One pass, which brings the proposals at the end of each path that lacks them. True: they are there; False:
        that takes another pass."""
        chains: dict[str, list[int]] = {}
        lacking: dict[int, list[int]] = {}
        places: dict[str, Place] = {}
        for index, (sequence, path) in enumerate(zip(sequences, paths, strict=True)):
            memory: _Memory = sequence.memory
            memory.follow(sequence)
            fits = sequence.base + len(path) <= self.info.context_length
            if fits and memory.at(path, sequence.num_guesses) is None:
                lacking[index] = self._lacking(sequence, path)
                chains[memory.key] = lacking[index][: self._engine.max_chain]
                places[memory.key] = Place(sequence.base, sequence.num_guesses)
        outcomes = self._engine.run(chains, places)[0] if chains else {}
        return [
            index not in lacking or _taken(sequence, paths[index], lacking[index], outcomes[sequence.memory.key])
            for index, sequence in enumerate(sequences)
        ]

    def _lacking(self, sequence: DraftSequence, path: Path) -> list[int]:
        """What vLLM's text of this sequence lacks, after what it has too much is taken back."""
        memory: _Memory = sequence.memory
        text = [*sequence.ids[memory.num_known :], *path]
        lacking = self._engine.follow(memory.key, memory.num_known, text) if memory.key else None
        if lacking is None:
            # Without the path, because a prompt cannot be taken back.
            memory.key, lacking = self._engine.add(sequence.ids, memory.spec.cache_salt, memory.spec), list(path)
        return lacking


def _taken(sequence: DraftSequence, path: Path, lacking: Sequence[int], outcome: Outcome) -> SpecdecError | bool:
    """Whether the pass has taken in all of the text; its proposals are remembered then."""
    memory: _Memory = sequence.memory
    if outcome.no_memory:
        return Overloaded("no KV blocks are free")
    if outcome.error is not None:
        return outcome.error
    if outcome.tokens is None or 0 < len(outcome.tokens) <= len(lacking):
        return False
    memory.num_known = sequence.base
    memory.proposals[path] = outcome.extra or Proposal(sequence.num_guesses)
    return True


def _next_path(sequence: DraftSequence) -> Path:
    """The path to feed: to the first place to grow at of which nothing is known, or to the last node."""
    paths = _paths(sequence)
    memory: _Memory = sequence.memory
    return next((path for path in paths if memory.at(path, sequence.num_guesses) is None), next(iter(paths)))


def _nodes(sequence: DraftSequence) -> list[Node]:
    there = set(zip(sequence.tree.parents, sequence.tree.token_ids, strict=True))
    nodes = []
    for path, (parent, num_children) in _paths(sequence).items():
        if (found := sequence.memory.at(path, sequence.num_guesses)) is not None:
            nodes += [node for node in found.nodes(parent, num_children) if (parent, node.token_id) not in there]
    return nodes


def _paths(sequence: DraftSequence) -> Mapping[Path, tuple[int, int]]:
    """Where the tree grows: the path to each place, with its node and the number of its children."""
    spots = sequence.spots or ((len(sequence.tree) - 1, 1 + sequence.num_siblings),)
    return {_path_to(sequence.tree, parent): (parent, num_children) for parent, num_children in spots}


def _path_to(tree: TokenTree, node: int) -> Path:
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(tree.token_ids[node])
        node = tree.parents[node]
    return tuple(reversed(tokens))
