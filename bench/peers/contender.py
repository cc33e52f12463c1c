"""A contender: a method to continue prompts greedily, its candidate settings, and the result of one run.

Does not know how a contender works, or the other contenders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Prompts = Sequence[list[int]]

THREADS = (1, 2)
"""The candidates for the threads of a process with a model."""

ADAPTIVE = -1
"""As a number of draft tokens: the contender adapts it."""


class Kind(StrEnum):
    """The contenders. ``our loop`` is one process without gRPC, ``padded`` is generate on a padded batch."""

    GENERATE = "transformers generate"
    ASSISTED = "transformers assisted"
    PADDED = "transformers padded"
    LOOP_ALONE = "our loop, target alone"
    LOOP = "our loop"
    ALONE = "our services, target alone"
    OURS = "our services"

    @property
    def is_ours(self) -> bool:
        return not self.value.startswith("transformers")


@dataclass(frozen=True, slots=True)
class Settings:
    """``threads`` of each process with a model: of the target's and the draft's, or of the only one.

    ``num_draft_tokens`` is None without a draft, or ADAPTIVE. ``ahead``: the draft grows ahead while the target
    verifies.
    """

    threads: tuple[int, ...]
    num_draft_tokens: int | None = None
    ahead: bool = False

    def __str__(self) -> str:
        threads = "+".join(str(count) for count in self.threads)
        ahead = ", growing ahead" if self.ahead else ""
        return f"threads {threads}{ahead}" + (f", K = {self.draft_tokens}" if self.draft_tokens else "")

    @property
    def draft_tokens(self) -> str:
        """The number of draft tokens as text; empty without a draft."""
        if self.num_draft_tokens is None:
            return ""
        return "adaptive" if self.num_draft_tokens == ADAPTIVE else str(self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run: one output per prompt, without an end token, and other figures of the contender."""

    seconds: float
    outputs: Sequence[list[int]]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all prompts together, from the start to the last token, including prefill."""
        return sum(len(output) for output in self.outputs) / self.seconds


@dataclass(frozen=True, slots=True)
class Contender:
    """``run(settings, prompts, max_tokens)`` continues all prompts concurrently."""

    kind: Kind
    streams: int
    run: Callable[[Settings, Prompts, int], Awaitable[Run]]
    threads: Sequence[tuple[int, ...]]
    num_draft_tokens: Sequence[int | None] = (None,)
    ahead: Sequence[bool] = (False,)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.streams} at a time" if self.streams > 1 else str(self.kind)


def before_end(output: Sequence[int], end_token_ids: Sequence[int]) -> list[int]:
    """The output before its first end token: transformers also returns that token and its padding."""
    end = next((index for index, token in enumerate(output) if token in end_token_ids), len(output))
    return list(output[:end])
