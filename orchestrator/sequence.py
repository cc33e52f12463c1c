"""One sample being generated: its committed ids, and when it ends.

Knows what was committed; does not know the draft and the target. All state that must survive the loss of a replica is
here.
"""

from __future__ import annotations

from enum import Enum

from tokenizers import Tokenizer

from orchestrator.request import Request
from orchestrator.rounds import Source
from orchestrator.statistics import Statistics
from orchestrator.text import Origin, Output, Piece
from specdec.core.noise import derive_seed
from specdec.core.rounds import Logprobs, PromptLogprobs, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class Sequence:
    """Prompt + committed ids of the sample ``index`` of a request, and its output as the client may see it."""

    def __init__(self, request: Request, index: int = 0, tokenizer: Tokenizer | None = None) -> None:
        self.request = request
        self.ids = request.prompt_ids[:]
        self.num_prompt_tokens = len(request.prompt_ids)
        self.keyed_by_token = request.keyed_by_token
        self.finish_reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.statistics = Statistics()
        # The prompt is the same for all samples.
        self.num_prompt_logprobs = None if index else request.output.num_prompt_logprobs
        self.prompt_logprobs: list[Logprobs] = []  # of the prompt's tokens but the first
        self.num_cached: int | None = None  # prompt tokens that the first target had in its cache
        self._seed = derive_seed(request.seed, index)
        self._output = Output(
            tokenizer,
            request.prompt_ids,
            stop=request.stops.strings,
            min_tokens=request.sampling.min_tokens,
            include_stop=request.stops.included,
            skip_special_tokens=request.output.skip_special_tokens,
        )
        for token_id in request.resume.get(index, ()):
            if not self.finished:
                self._commit(token_id, Origin.BONUS)
                self._output.release()
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
        return self.request.stops.max_tokens - self.num_committed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def spec(self) -> SequenceSpec:
        """This sequence as a replica opens it now."""
        return SequenceSpec(
            token_ids=self.ids[:],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.request.sampling,
            seed=self._seed,
            method=self.request.drafting.method,
            cache_salt=self.request.caller.cache_salt,
            priority=self.request.priority,
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.num_prompt_logprobs is not None and self._num_received < self.num_prompt_tokens - 1

    @property
    def _num_received(self) -> int:
        return sum(map(len, self.prompt_logprobs))

    def add_prompt_logprobs(self, part: PromptLogprobs) -> bool:
        """Add the next logprobs of the prompt; those that are there already are skipped, because a replay sends them
        again. False: they were not requested, or are not the next ones."""
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
        for index, (token_id, origin) in enumerate(committed):
            self._commit(token_id, origin, verdict.logprobs and verdict.logprobs.part(index, index + 1))
            if self.finished:
                break
        return self._output.release(self.finished)

    def _commit(self, token_id: int, origin: Origin, logprobs: Logprobs | None = None) -> None:
        self.ids.append(token_id)
        stop: str | int | None
        stops = self.request.stops
        if token_id in stops.token_ids:
            self.finish_reason = FinishReason.STOP
            stop = self._output.push(token_id, origin, logprobs) if stops.included else None
            stop = self._output.finish() if stop is None else stop
            self.matched = token_id if stop is None else stop
            return
        stop = self._output.push(token_id, origin, logprobs)
        if stop is None and self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
            stop = self._output.finish()
        if stop is not None:
            self.finish_reason, self.matched = FinishReason.STOP, stop
