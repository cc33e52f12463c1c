"""Proposals in vLLM's workers, by the same draws as in our own engine. Knows jobs of a pass; does not know batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafter import DraftSequence, Node
from draft_service.drafters.proposal import draw, guess
from specdec.backends.choice import choose
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.grammar import Grammars
from specdec.vllm.passes import Sampled, WorkerJob, WorkerStates


@dataclass(frozen=True, slots=True)
class Place:
    """Ids before ``base`` are committed, the others are the draft's. ``num_guesses`` children are wanted."""

    base: int
    num_guesses: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """The children of one place, likeliest first. ``num_guesses`` were asked for; there are fewer if the model gives no
    more. ``draft_probs``: of a token that was drawn."""

    num_guesses: int
    token_ids: tuple[int, ...] = ()
    confidence: int = 0
    draft_probs: SparseDistribution | None = None

    def nodes(self, parent: int, most: int) -> list[Node]:
        return [Node(parent, token, self.draft_probs, self.confidence) for token in self.token_ids[:most]]


class DraftSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids, the extra of a
    pass its Place. All of the chain is accepted, because it is the text; what comes after it is a Proposal."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        self._backend = choose("torch", device)
        self._states = WorkerStates(grammars)
        self.forget = self._states.forget

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        sound = {place: self._sequence(jobs[place]) for place, job in enumerate(jobs) if job.sound}
        found: dict[int, Proposal] = {}
        keyed = [place for place, sequence in sound.items() if sequence.spec.keyed_by_token]
        last = {place: PassOutputs(jobs[place].logits[-1:], torch.empty(0), torch.ones(1)).as_one() for place in keyed}
        places = [(sound[place], sound[place].tree, last[place]) for place in keyed]
        for place, [guesses] in zip(keyed, guess(places, self._backend), strict=True):
            found[place] = Proposal(sound[place].num_guesses, guesses.token_ids, guesses.confidence)
        drawn = [place for place in sound if place not in found]
        logits = [jobs[place].logits[-1:] for place in drawn]
        nodes = draw([sound[place] for place in drawn], logits, self._backend.logits_per_call)
        for place, some in zip(drawn, nodes, strict=True):
            for node in some:
                found[place] = Proposal(sound[place].num_guesses, (node.token_id,), draft_probs=node.draft_probs)
        return [
            Sampled((*job.chain, found[place].token_ids[0]), found[place]) if place in found else Sampled()
            for place, job in enumerate(jobs)
        ]

    def _sequence(self, job: WorkerJob) -> DraftSequence:
        memory, place = self._states.of(job), job.extra
        # Only the number of ids counts where nothing depends on the text.
        committed = array("I", bytes(4 * place.base))
        if memory.sampling.transforms.active:
            committed = array("I", [*job.ids(0), *job.chain][: place.base])
            if error := memory.sampling.take_in(committed):
                raise error
        tree = TokenTree.chain([*job.ids(place.base), *job.chain[max(0, place.base - job.num_ids) :]])
        return DraftSequence(job.payload, committed, tree, memory, num_guesses=place.num_guesses)
