"""One sample being generated: its committed ids, and when it ends.

Knows what was committed; does not know the draft and the target. All state that must survive the loss of a replica is
here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import Enum

from tokenizers import Tokenizer

from orchestrator.rounds import Source
from orchestrator.statistics import Statistics
from orchestrator.text import Origin, Output, Piece
from specdec.core.rounds import (
    CACHE_SALT,
    GRAMMAR,
    LOGPROBS,
    RESTRICTIONS,
    TRANSFORMS,
    Logprobs,
    PromptLogprobs,
    Verdict,
)
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class Sequence:
    """Prompt + committed ids of one sample, and its output as the client may see it."""

    def __init__(
        self,
        prompt_ids: Seq[int],
        max_tokens: int,
        sampling: SamplingParams,
        seed: int,
        method: Method,
        stop_token_ids: frozenset[int] = frozenset(),
        stop: Seq[str] = (),
        tokenizer: Tokenizer | None = None,
        received: Seq[int] = (),
        cache_salt: bytes = b"",
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        """``received``: output ids that the client has already, from another orchestrator. ``include_stop``: what ends
        the output is a part of it. The last two: likeliest tokens beside each token; None: no logprobs."""
        self.ids = array("I", prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.stop_token_ids = stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.statistics = Statistics()
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self.prompt_logprobs: list[Logprobs] = []  # of the prompt's tokens but the first
        self.num_cached: int | None = None  # prompt tokens that the first target had in its cache
        self._include_stop = include_stop
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._seed = seed
        self._method = method
        self._cache_salt = cache_salt
        self._output = Output(tokenizer, prompt_ids, stop, sampling.min_tokens, include_stop, skip_special_tokens)
        for token_id in received:
            if not self.finished:
                self._commit(token_id, Origin.BONUS)
                self._output.take()
        self._output.skip()

    @property
    def base(self) -> int:
        return len(self.ids)

    @property
    def num_committed(self) -> int:
        return self.base - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - self.num_committed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def spec(self) -> SequenceSpec:
        """This sequence as a replica opens it now."""
        return SequenceSpec(
            self.ids[:], self.num_prompt_tokens, self._sampling, self._seed, self._method, self._cache_salt
        )

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that its target must have."""
        sampling = self._sampling
        found = set(self.draft_needs)
        found |= {TRANSFORMS} if sampling.transforms else set()
        found |= {RESTRICTIONS} if sampling.restricts else set()
        found |= {GRAMMAR} if sampling.grammar else set()
        found |= {LOGPROBS} if self.num_logprobs is not None or self.num_prompt_logprobs is not None else set()
        return frozenset(found)

    @property
    def draft_needs(self) -> frozenset[str]:
        """Capabilities that its draft must have. A draft without the transforms is allowed: it only guesses worse."""
        return frozenset({CACHE_SALT} if self._cache_salt else ())

    @property
    def keyed_by_token(self) -> bool:
        return self._sampling.greedy or self._method is Method.COUPLED

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.num_prompt_logprobs is not None and self._num_received < self.num_prompt_tokens - 1

    @property
    def _num_received(self) -> int:
        return sum(map(len, self.prompt_logprobs))

    def take_prompt_logprobs(self, part: PromptLogprobs) -> bool:
        """Take the next logprobs of the prompt; those that are there already are skipped, because a replay sends them
        anew. False: they were not requested, or are not the next ones."""
        expected = 1 + self._num_received
        end = part.position + len(part.logprobs)
        num_top = self.num_prompt_logprobs
        if num_top is None or part.logprobs.num_top > num_top:
            return False
        if not 1 <= part.position <= expected or end > self.num_prompt_tokens:
            return False
        if end > expected:
            self.prompt_logprobs.append(part.logprobs.part(expected - part.position, len(part.logprobs)))
        return True

    def extend(self, tree: TokenTree, verdict: Verdict, source: Source | None = None) -> Piece:
        """Commit a verdict on ``tree``, token by token up to a stop; the tokens after the stop are dropped. ``source``:
        of the tree."""
        if self.num_cached is None:
            self.num_cached = min(verdict.num_cached_tokens, self.num_prompt_tokens)
        proposed = Origin.LOOKUP if source is Source.LOOKUP else Origin.DRAFT
        # An open verifies nothing, even when it replays a round with a tree.
        end = Origin.BONUS if not verdict.round or tree.ends_with(verdict.accepted) else Origin.CORRECTION
        committed = [*((tree.token_ids[node], proposed) for node in verdict.accepted), (verdict.next_token, end)]
        for place, (token_id, origin) in enumerate(committed):
            self._commit(token_id, origin, verdict.logprobs and verdict.logprobs.part(place, place + 1))
            if self.finished:
                break
        return self._output.take(self.finished)

    def _commit(self, token_id: int, origin: Origin, logprobs: Logprobs | None = None) -> None:
        self.ids.append(token_id)
        stop: str | int | None
        if token_id in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP
            stop = self._output.push(token_id, origin, logprobs) if self._include_stop else None
            stop = self._output.finish() if stop is None else stop
            self.matched = token_id if stop is None else stop
            return
        stop = self._output.push(token_id, origin, logprobs)
        if stop is None and self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
            stop = self._output.finish()
        if stop is not None:
            self.finish_reason, self.matched = FinishReason.STOP, stop
