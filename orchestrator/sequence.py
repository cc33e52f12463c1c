"""One sample being generated: its committed ids, and when it ends.

Knows what was committed; does not know the draft and the target. All state that must survive the loss of a replica is
here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import Enum

from tokenizers import Tokenizer

from orchestrator.statistics import Statistics
from orchestrator.text import Origin, Output, Piece
from specdec.core.rounds import CACHE_SALT, TRANSFORMS, Verdict
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
    ) -> None:
        """``received``: output ids that the client has already, from another orchestrator."""
        self.ids = array("I", prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.stop_token_ids = stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.matched: str | int | None = None
        self.statistics = Statistics()
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._seed = seed
        self._method = method
        self._cache_salt = cache_salt
        self._output = Output(tokenizer, prompt_ids, stop, sampling.min_tokens)
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
        return self.draft_needs | ({TRANSFORMS} if self._sampling.changes_logits else set())

    @property
    def draft_needs(self) -> frozenset[str]:
        """Capabilities that its draft must have. A draft without the transforms is allowed: it only guesses worse."""
        return frozenset({CACHE_SALT} if self._cache_salt else ())

    @property
    def keyed_by_token(self) -> bool:
        return self._sampling.greedy or self._method is Method.COUPLED

    def extend(self, tree: TokenTree, verdict: Verdict) -> Piece:
        """Commit a verdict on ``tree``, token by token up to a stop; the tokens after the stop are dropped."""
        # An open verifies nothing, even when it replays a round with a tree.
        end = Origin.BONUS if not verdict.round or tree.ends_with(verdict.accepted) else Origin.CORRECTION
        for token_id, origin in (
            *((tree.token_ids[node], Origin.DRAFT) for node in verdict.accepted),
            (verdict.next_token, end),
        ):
            self._commit(token_id, origin)
            if self.finished:
                break
        return self._output.take(self.finished)

    def _commit(self, token_id: int, origin: Origin) -> None:
        self.ids.append(token_id)
        stop: str | int | None
        if token_id in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP
            stop = self._output.finish()
            self.matched = token_id if stop is None else stop
            return
        stop = self._output.push(token_id, origin)
        if stop is None and self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
            stop = self._output.finish()
        if stop is not None:
            self.finish_reason, self.matched = FinishReason.STOP, stop
