"""What passes between a service, vLLM's engine and its workers. Imports no vllm, so that tests need none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdec.core.errors import SpecdecError
from specdec.core.one_by_one import one_by_one
from specdec.core.rounds import Logprobs
from specdec.sampling.grammar import Grammars
from specdec.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """A sequence of a pass, as a worker sees it. ``payload``: what the caller gave when it added the sequence;
    ``extra``: what it gave for this pass. ``num_ids``: ids before the chain; ``ids(n)``: those from position n on.
    ``logits`` [1 + chain, vocab_size]: after the last of the ids, and after each token of the chain. ``sound``: the
    model computes numbers there."""

    key: str
    payload: Any
    extra: Any
    num_ids: int
    ids: Callable[[int], list[int]]
    chain: Sequence[int]
    logits: Tensor
    sound: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens`` continue the text: some of the chain, and one more; empty: the logits are not finite. ``extra`` goes
    back to the caller; a SpecdecError, without tokens, ends the sequence."""

    tokens: Sequence[int] = ()
    extra: Any = None


class WorkerSampler(Protocol):
    """Made once in each worker, with its device and the model's grammars, or None."""

    def sample(self, jobs: Sequence[WorkerJob]) -> Sequence[Sampled]: ...

    def forget(self, key: str) -> None:
        """The sequence has ended."""


class DraftingSampler(WorkerSampler, Protocol):
    """Of a model that drafts by itself."""

    def draft(self, logits: Tensor, places: Sequence[Place | None]) -> Tensor:
        """Draft tokens [rows] int64 from the proposer's logits [rows, vocab_size]. None: of a text that is not sampled
        yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the text of a sequence."""

    key: str
    position: int


@dataclass(frozen=True, slots=True)
class Proposer:
    """What a model drafts with by itself. ``name``: as it is shown; ``words``: vLLM's, of its speculative_config."""

    name: str
    words: Mapping[str, Any]


def sampled_by(sampler: WorkerSampler, jobs: Sequence[WorkerJob]) -> list[Sampled]:
    """A job for which the sampler raises has the error as its extra."""
    sampled = one_by_one(sampler.sample, jobs)
    return [Sampled(extra=result) if isinstance(result, SpecdecError) else result for result in sampled]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one sequence in a pass: see Sampled. ``tokens`` None: its prefill continues in the next pass. ``no_memory``:
    no KV blocks were free for it. With its first tokens: ``num_cached_tokens`` of its ids, and ``prompt_logprobs``, if
    they were asked for. ``draft``: what was drafted after its tokens, by the proposer its ids, by the model itself the
    sampler's extras, as far as there was a token."""

    tokens: tuple[int, ...] | None = None
    extra: Any = None
    no_memory: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: Logprobs | None = None
    draft: tuple[Any, ...] = ()

    @property
    def error(self) -> SpecdecError | None:
        """What ends the sequence."""
        return self.extra if isinstance(self.extra, SpecdecError) else None


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest:
    """The logprobs of the first ``num_tokens`` ids of a sequence but the first one, with the ``num_top`` likeliest
    tokens beside each."""

    num_tokens: int
    num_top: int


@dataclass(slots=True)
class WorkerState:
    """What a worker keeps of a sequence."""

    sampling: SamplingState


class WorkerStates:
    """Of the sequences that a worker has seen and that have not ended. Their payload is a SequenceSpec without ids."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._states: dict[str, WorkerState] = {}

    def of(self, job: WorkerJob) -> WorkerState:
        if job.key not in self._states:
            spec, grammars = job.payload, self._grammars
            grammar = grammars.start(spec.sampling.grammar, spec.cache_salt) if grammars is not None else None
            mask = grammar.result().mask() if grammar is not None else None
            self._states[job.key] = WorkerState(SamplingState(spec, mask))
        return self._states[job.key]

    def get(self, key: str) -> WorkerState | None:
        return self._states.get(key)

    def forget(self, key: str) -> None:
        self._states.pop(key, None)


def num_kept(known: Sequence[int], tail: Sequence[int], minimum: int) -> int:
    """How many of the ids ``known`` stay if the text is to be ``tail`` from there on: those that agree, and at least
    ``minimum``, which are a prompt's and cannot be taken back. The last of them is fed again where its logits are
    wanted."""
    pairs = enumerate(zip(known, tail, strict=False))
    agreed = next((i for i, (one, other) in pairs if one != other), min(len(known), len(tail)))
    return max(agreed, minimum)
