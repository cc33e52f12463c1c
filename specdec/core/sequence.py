"""The description of a sequence that both model services share. Does not know models, streams or text.

A *sequence* is one sample being generated. Its *base* is the number of prompt + committed tokens, which is the 0-based
position of the next token. The *root* is the token at base - 1: the last committed token, input of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple


class Method(Enum):
    """How the target decides which draft tokens to accept: coupled sampling, token or block verification."""

    COUPLED = "coupled"
    TOKEN = "token"
    BLOCK = "block"

    def keyed_by_token(self, temperature: float) -> bool:
        """True under greedy and coupled sampling: the output does not depend on the proposal.

        Only then may a proposal be grown ahead, cut, dropped or sent late, and may an output be resumed. Token and
        block verification correct for the distribution a chain was drawn from, so the chain must be verified as it was
        drawn.
        """
        return temperature == 0.0 or self is Method.COUPLED


class Priority(IntEnum):
    """How urgent a request is, the most urgent first. The numbers are those of the contract."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3

    @property
    def behind_s(self) -> float:
        """A request counts as so much younger than it is, wherever the oldest comes first: its age counts as well."""
        return _BEHIND_S[self]


_BEHIND_S = {Priority.INTERACTIVE: 0.0, Priority.STANDARD: 5.0, Priority.BATCH: 60.0}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The request's transforms from logits to a distribution; the defaults change nothing.

    ``temperature`` 0 is greedy. ``logit_bias`` has (token id, bias) pairs ordered by token id. ``end_token_ids`` are
    excluded from the first ``min_tokens`` tokens of the output. Only ``allowed_token_ids``, which ascend, are drawn
    (empty: all), and the last id of each of ``bad_words`` never after the others of it. The output follows ``grammar``,
    in llguidance's form (empty: none).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the logits depend on the tokens of the text."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether the logits change before temperature and filters (specdec.sampling.logits_processors)."""
        return self.transforms or self.restricts or bool(self.grammar)

    @property
    def transforms(self) -> bool:
        """Whether there are penalties, biases or a minimum length."""
        return self.penalizes or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def restricts(self) -> bool:
        """Whether tokens are forbidden for the whole output."""
        return bool(self.allowed_token_ids or self.bad_words)


class Draw(NamedTuple):
    """The inputs of a coupled draw beside the logits."""

    sampling: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to open on a replica, the first time or in a replay.

    ``token_ids`` are prompt + committed tokens, in an array where there are many: a tuple takes nine times the memory.
    The first ``num_prompt_tokens`` of them are the prompt, so that transforms of the output alone give the same result
    after a replay. ``seed`` is the seed of this sample. Cached keys and values are shared only between sequences with
    the same ``cache_salt``. ``priority`` decides when it is computed, and nothing else.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    method: Method = Method.COUPLED
    cache_salt: bytes = b""
    priority: Priority = Priority.STANDARD

    @property
    def keyed_by_token(self) -> bool:
        """See Method.keyed_by_token."""
        return self.method.keyed_by_token(self.sampling.temperature)
