"""What takes part: a way to continue prompts greedily, the settings to choose from, and what one run of it gives.

Refuses to know how a contender works, and what the others do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Prompts = Sequence[list[int]]

THREADS = (1, 2)
"""What every process with a model may have."""

ADAPTIVE = -1
"""In place of a number of draft tokens: the contender chooses as it goes."""


class Kind(StrEnum):
    """``our loop`` is one process without gRPC, ``padded`` is generate on a batch."""

    GENERATE = "transformers generate"
    ASSISTED = "transformers assisted"
    PADDED = "transformers padded"
    CONTINUOUS = "transformers continuous"
    LOOP_ALONE = "our loop, target alone"
    LOOP = "our loop"
    ALONE = "our services, target alone"
    OURS = "our services"

    @property
    def is_ours(self) -> bool:
        return not self.value.startswith("transformers")


@dataclass(frozen=True, slots=True)
class Settings:
    """``threads`` of each process with a model: of the target's and the draft's, or of the one there is.

    ``num_draft_tokens`` is None where nothing is drafted, or ADAPTIVE. ``ahead``: the draft goes on while the target
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
        """In words; nothing where nothing is drafted."""
        if self.num_draft_tokens is None:
            return ""
        return "adaptive" if self.num_draft_tokens == ADAPTIVE else str(self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """What became of the prompts: outputs without an end token, and whatever else the contender knows of the run."""

    seconds: float
    outputs: Sequence[list[int]]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Of all prompts together, from the start to the last token, prefill included."""
        return sum(len(output) for output in self.outputs) / self.seconds


@dataclass(frozen=True, slots=True)
class Contender:
    """``run(settings, prompts, max_tokens)`` continues all prompts, at the same time if there are several."""

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
    """An output up to its end token, if it has one: transformers gives that and what it pads with, too."""
    end = next((index for index, token in enumerate(output) if token in end_token_ids), len(output))
    return list(output[:end])
