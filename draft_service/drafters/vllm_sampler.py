"""Proposals in vLLM's workers, by the same draws as in our own engine. Knows jobs of a pass; does not know batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafter import DraftSequence, Node
from draft_service.drafters.proposal import draw, guess
from specdec.backends.choice import choose
from specdec.core.tree import TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.state import SamplingState
from specdec.vllm.passes import Sampled, WorkerJob, are_sound


@dataclass(slots=True)
class _Memory:
    sampling: SamplingState


class DraftSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids. The extra of a
    pass is the base: the ids before it are committed, the others are the draft's. All of the chain is accepted, because
    it is the text; the token after it is the proposal, which goes back as a Node."""

    def __init__(self, device: torch.device) -> None:
        self._backend = choose("torch", device)
        self._memories: dict[str, _Memory] = {}

    def forget(self, key: str) -> None:
        self._memories.pop(key, None)

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        sound = {place: self._sequence(jobs[place]) for place, is_sound in enumerate(are_sound(jobs)) if is_sound}
        nodes: dict[int, Node] = {}
        keyed = [place for place, sequence in sound.items() if sequence.spec.keyed_by_token]
        places = [
            (
                sound[place],
                sound[place].tree,
                PassOutputs(jobs[place].logits[-1:], torch.empty(0), torch.ones(1)).as_one(),
            )
            for place in keyed
        ]
        for place, [guesses] in zip(keyed, guess(places, self._backend), strict=True):
            nodes[place] = Node(len(sound[place].tree) - 1, guesses.token_ids[0], confidence=guesses.confidence)
        drawn = [place for place in sound if place not in nodes]
        logits = [jobs[place].logits[-1:] for place in drawn]
        drawings = draw([sound[place] for place in drawn], logits, self._backend.logits_per_call)
        nodes.update((place, found[0]) for place, found in zip(drawn, drawings, strict=True) if found)
        return [
            Sampled((*job.chain, nodes[place].token_id), nodes[place]) if place in nodes else Sampled()
            for place, job in enumerate(jobs)
        ]

    def _sequence(self, job: WorkerJob) -> DraftSequence:
        memory = self._memories.get(job.key)
        if memory is None:
            memory = self._memories[job.key] = _Memory(SamplingState(job.payload))
        text, base = [*job.ids(), *job.chain], job.extra
        memory.sampling.take_in(text[:base])
        return DraftSequence(job.payload, text[:base], TokenTree.chain(text[base:]), memory)
