"""A language model in vLLM as the drafter: a pass feeds one path of each tree, and gives candidates at its end.

Its workers draw them (vllm_sampler.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draft_service.drafter import Branch, Candidates, DraftSequence
from draft_service.drafters.vllm_sampler import Request
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import Candidate
from specdec.vllm.passes import Outcome

if TYPE_CHECKING:
    from specdec.vllm.engine import VllmEngine

SAMPLER = "draft_service.drafters.vllm_sampler:DraftSampler"

Path = tuple[int, ...]
"""Tokens from the base to a node."""


@dataclass(slots=True)
class _State:
    spec: SequenceSpec  # without ids
    key: str = ""  # empty: unknown to vLLM
    num_known: int = 0  # committed ids that vLLM has, at least
    base: int = 0  # of the candidates
    candidates: dict[Path, tuple[int, Candidates]] = field(default_factory=dict)  # with the number that was requested

    def follow(self, sequence: _Sequence) -> None:
        """Keep the candidates that are still possible. Those that were drawn hold for one base."""
        if sequence.base == self.base:
            return
        committed = tuple(sequence.ids[self.base :]) if self.base else ()
        kept = self.candidates.items() if self.base and self.spec.keyed_by_token else ()
        length = len(committed)
        self.candidates = {path[length:]: entry for path, entry in kept if path[:length] == committed}
        self.base = sequence.base

    def at(self, path: Path, num_candidates: int) -> Candidates | None:
        num_requested, candidates = self.candidates.get(path, (0, Candidates()))
        return candidates if num_requested >= num_candidates else None


_Sequence = DraftSequence[_State]


class VllmDrafter:
    """See draft_service.drafter.Drafter. Where a tree is to grow below several nodes, those with known candidates grow,
    and the most likely other one: each further path would take another pass."""

    def __init__(self, engine: VllmEngine, info: ModelInfo) -> None:
        self._engine = engine
        self._yields = False
        # What follows a full context can be guessed, but not by vLLM.
        self.info = dataclasses.replace(
            info,
            context_length=info.context_length - 1,
            capabilities=(*info.capabilities, AHEAD, SIBLINGS, CACHE_SALT),
        )

    def open(self, spec: SequenceSpec) -> _State:
        return _State(dataclasses.replace(spec, token_ids=()))

    def close(self, state: _State) -> None:
        if state.key:
            self._engine.remove(state.key)

    def request_yield(self, requested: bool) -> None:
        self._yields = requested

    def cache_use(self) -> tuple[int, int]:
        return self._engine.cache_use()

    def learn(self, sequences: Sequence[_Sequence]) -> list[SpecdecError | bool]:
        return self._feed(sequences, [()] * len(sequences), num_further=0)

    def grow(self, sequences: Sequence[_Sequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        for sequence in sequences:
            sequence.state.follow(sequence)
        fed = self._feed(sequences, list(map(_next_path, sequences)), num_further=self._num_further(sequences))
        grown: list[Sequence[Candidate] | SpecdecError | None] = []
        for sequence, outcome in zip(sequences, fed, strict=True):
            proposed = _children if sequence.branches else _chain
            grown.append(proposed(sequence) if outcome is True else outcome or None)
        return grown

    def _num_further(self, sequences: Sequence[_Sequence]) -> int:
        """Nodes after the first that each wants, one below the other: they are drafted in the same step."""
        if self._yields or any(sequence.branches for sequence in sequences):
            return 0
        return max(0, min(sequence.num_wanted for sequence in sequences) - 1)

    def _feed(
        self, sequences: Sequence[_Sequence], paths: Sequence[Path], num_further: int
    ) -> list[SpecdecError | bool]:
        """One pass, which gives the candidates at the end of each path that lacks them. True: they are there; False:
        that takes another pass. ``num_further``: likewise below the likeliest of them, and so on."""
        chains: dict[str, list[int]] = {}
        lacking: dict[int, list[int]] = {}
        requests: dict[str, Request] = {}
        for index, (sequence, path) in enumerate(zip(sequences, paths, strict=True)):
            state = sequence.state
            state.follow(sequence)
            fits = sequence.base + len(path) <= self.info.context_length
            if fits and state.at(path, sequence.num_candidates) is None:
                lacking[index] = self._lacking(sequence, path)
                chains[state.key] = lacking[index][: self._engine.max_chain]
                requests[state.key] = Request(sequence.base, sequence.num_candidates)
        outcomes = self._engine.run(chains, requests, num_further)[0] if chains else {}
        return [
            index not in lacking
            or _take(outcomes[sequence.state.key], sequence, path=paths[index], num_lacking=len(lacking[index]))
            for index, sequence in enumerate(sequences)
        ]

    def _lacking(self, sequence: _Sequence, path: Path) -> list[int]:
        """What vLLM's text of this sequence lacks, after what it has too much is taken back."""
        state = sequence.state
        text, lacking = [*sequence.ids[state.num_known :], *path], None
        if state.key:
            lacking = self._engine.follow(state.key, state.num_known, text, num_committed=sequence.base)
        if lacking is None:
            # Without the path, because a prompt cannot be taken back.
            state.key, lacking = self._engine.add(sequence.ids, state.spec.cache_salt, state.spec), list(path)
        return lacking


def _take(outcome: Outcome, sequence: _Sequence, *, path: Path, num_lacking: int) -> SpecdecError | bool:
    """Whether the pass has taken in all of the text; its candidates are remembered then."""
    state = sequence.state
    if outcome.no_memory:
        return Overloaded("no KV blocks are free")
    if outcome.error is not None:
        return outcome.error
    if outcome.tokens is None or 0 < len(outcome.tokens) <= num_lacking:
        return False
    state.num_known = sequence.base
    for candidates in (outcome.extra or Candidates(), *outcome.draft):
        state.candidates[path] = sequence.num_candidates, candidates
        path = (*path, *candidates.token_ids[:1])
    return True


def _next_path(sequence: _Sequence) -> Path:
    """The path to feed: to the first node to grow below without candidates, or to the last node."""
    paths = [path for path, _ in _paths(sequence)]
    state = sequence.state
    return next((path for path in paths if state.at(path, sequence.num_candidates) is None), paths[0])


def _children(sequence: _Sequence) -> list[Candidate]:
    """The children at the branches that the tree lacks."""
    children: list[Candidate] = []
    for path, branch in _paths(sequence):
        if (candidates := sequence.state.at(path, sequence.num_candidates)) is not None:
            children += candidates.below(branch.parent, branch.num_children)
    return sequence.tree.lacking(children)


def _chain(sequence: _Sequence) -> list[Candidate]:
    """The chain below the last node while candidates are known, each node followed by its siblings."""
    chain: list[Candidate] = []
    last = len(sequence.tree) - 1
    path = sequence.tree.path_ids(last)
    for parent in range(last, last + sequence.num_wanted):
        candidates = sequence.state.at(path, sequence.num_candidates)
        if candidates is None or not candidates.token_ids:
            break
        chain += candidates.below(parent, 1 + sequence.num_siblings)
        path = (*path, candidates.token_ids[0])
    return chain


def _paths(sequence: _Sequence) -> list[tuple[Path, Branch]]:
    return [(sequence.tree.path_ids(branch.parent), branch) for branch in sequence.next_branches]
