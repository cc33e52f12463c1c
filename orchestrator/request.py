"""The input and output of the orchestrator: a checked request, and the events of its answer.

Plain values; does not know the public API's messages (orchestrator.api) and how a sample is decoded.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from orchestrator.rounds import RoundRecord
from orchestrator.sequence import FinishReason, Sequence
from orchestrator.statistics import Statistics
from orchestrator.text import Piece
from specdec.core.sequence import Method, SamplingParams
from specdec.sampling.grammar import Compiled


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request, with every default filled in. Ids are arrays: a tuple takes nine times the memory."""

    prompt_ids: array[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    num_samples: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    method: Method
    num_draft_tokens: int | None  # per round; None: adaptive
    resume: Mapping[int, array[int]]  # output ids that the client has already, by sample
    cache_salt: bytes
    include_stop: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None  # likeliest tokens beside each token; None: no logprobs
    num_prompt_logprobs: int | None = None
    returns_prompt: bool = False
    returns_rounds: bool = False
    prediction: array[int] = field(default_factory=lambda: array("I"))  # ids that the output is expected to repeat
    grammar: Future[Compiled] | None = None  # of ``sampling.grammar``
    owner: bytes = b""  # what its samples write is proposed in requests of the same owner alone
    account: str = ""  # of the caller

    @property
    def num_given_ids(self) -> int:
        """What the caller sent to be read: prompt, prediction, and the output to resume."""
        return len(self.prompt_ids) + len(self.prediction) + sum(map(len, self.resume.values()))


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended, its token counts and its statistics."""

    reason: FinishReason
    matched: str | int | None  # the stop string or stop token that ended it
    num_prompt_tokens: int
    num_completion_tokens: int  # with those of what ended it
    statistics: Statistics
    num_cached: int  # prompt tokens


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of the prompt; ``position`` is that of its first id. ``piece.logprobs`` lack the prompt's first token."""

    position: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round of the sample ``index``, with ``number`` rounds before it; times outside of the target in seconds."""

    index: int
    number: int
    record: RoundRecord
    draft_wait_s: float
    path_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of the sample ``index``; ``position`` is that of its first id in the output."""

    index: int
    position: int
    piece: Piece
    finish: Finish | None = None  # with the last chunk

    @staticmethod
    def of(index: int, position: int, piece: Piece, sequence: Sequence) -> Chunk:
        """A chunk, with the finish of ``sequence`` if it has ended."""
        if sequence.finish_reason is None:
            return Chunk(index, position, piece)
        finish = Finish(
            sequence.finish_reason,
            sequence.matched,
            sequence.num_prompt_tokens,
            sequence.num_committed,
            sequence.statistics,
            sequence.num_cached or 0,
        )
        return Chunk(index, position, piece, finish)


Event = Chunk | PromptPart | RoundReport
