"""The result of one mode in one situation, from the statistics that the orchestrator sends at the end of a sample.

Knows how counts become rates; does not know how they were measured and are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Run:
    """Concurrent samples, and their speculation statistics (``told``)."""

    num_tokens: int
    seconds: float
    told: tuple[generation_pb2.SpeculationStats, ...]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Counts of verdicts on drafts, and of hits (foreseen): the next tree is already there when the verdict arrives.

    A correction at depth n follows n accepted tokens.
    """

    num_bonuses: int = 0
    num_bonus_hits: int = 0
    num_corrections: tuple[int, ...] = ()
    num_correction_hits: tuple[int, ...] = ()

    @property
    def bonus_hits(self) -> float | None:
        """The hit rate of bonuses; None without bonuses."""
        return _share(self.num_bonus_hits, self.num_bonuses)

    @property
    def correction_hits(self) -> float | None:
        return _share(sum(self.num_correction_hits), sum(self.num_corrections))

    @property
    def hits(self) -> float | None:
        foreseen = self.num_bonus_hits + sum(self.num_correction_hits)
        return _share(foreseen, self.num_bonuses + sum(self.num_corrections))

    @property
    def firsts(self) -> float | None:
        """The share of drafts with a correct first token."""
        num_wrong = self.num_corrections[0] if self.num_corrections else 0
        num_verdicts = self.num_bonuses + sum(self.num_corrections)
        return _share(num_verdicts - num_wrong, num_verdicts)


@dataclass(frozen=True, slots=True)
class RoundMs:
    """The parts of the time from one verdict to the next, in milliseconds.

    ``rest``: the network to the target and back, the orchestrator's own work, replays.
    """

    draft_wait: float = 0.0
    target_queue: float = 0.0
    target_pass: float = 0.0
    target_sample: float = 0.0
    rest: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """``rates`` are the tokens per second of the runs, one run per turn. The other figures are over all runs together.

    ``round_trip_ms`` is None if the situation is not a distance. ``on_time`` is the share of drafts that arrived
    without a wait, None without drafts. ``drafts_per_round`` is the share of rounds with a draft.
    """

    pair: str
    temperature: float
    situation: str
    round_trip_ms: float | None
    mode: str
    rates: tuple[float, ...]
    draft_tokens_per_round: float = 0.0
    accepted_per_round: float = 0.0
    tokens_per_round: float = 1.0
    on_time: float | None = None
    unused_nodes_per_round: float = 0.0
    outcomes: Outcomes = Outcomes()
    round_ms: RoundMs = RoundMs()
    drafts_per_round: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The median of the runs."""
        return statistics.median(self.rates)

    def over(self, other: Row) -> float:
        """The median over the turns of the speed ratio. A turn has one prompt and takes a minute or two; the prompts
        and the load of the machine vary more between turns than within one."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))

    @staticmethod
    def of(
        pair: str, temperature: float, situation: str, round_trip_ms: float | None, mode: str, runs: Sequence[Run]
    ) -> Row:
        told = [each for run in runs for each in run.told]

        def total(value: Callable[[generation_pb2.SpeculationStats], int]) -> int:
            return sum(map(value, told))

        num_rounds = max(1, total(lambda each: each.num_rounds))
        num_drafts = total(lambda each: each.num_drafts)
        num_draft_tokens = total(lambda each: each.num_draft_tokens)
        return Row(
            pair,
            temperature,
            situation,
            round_trip_ms,
            mode,
            tuple(run.num_tokens / run.seconds for run in runs),
            num_draft_tokens / num_rounds,
            total(lambda each: each.num_accepted_tokens) / num_rounds,
            sum(run.num_tokens for run in runs) / num_rounds,
            _share(total(lambda each: each.num_drafts_on_time), num_drafts),
            (total(lambda each: each.num_received_nodes + each.num_lookup_tokens) - num_draft_tokens) / num_rounds,
            Outcomes(
                total(lambda each: each.num_bonuses),
                total(lambda each: each.num_bonus_hits),
                _added([each.num_corrections_per_pos for each in told]),
                _added([each.num_correction_hits_per_pos for each in told]),
            ),
            _round_ms(told),
            num_drafts / num_rounds,
        )


def _round_ms(told: Sequence[generation_pb2.SpeculationStats]) -> RoundMs:
    # The clock starts with the first verdict, so the first round has no time.
    num_rounds = max(1, sum(each.num_rounds - 1 for each in told))

    def ms(microseconds: Sequence[int]) -> float:
        return sum(microseconds) / num_rounds / 1e3

    parts = (
        ms([each.draft_wait_us for each in told]),
        ms([each.target_queue_us for each in told]),
        ms([each.target_pass_us for each in told]),
        ms([each.target_sample_us for each in told]),
    )
    return RoundMs(*parts, rest=max(0.0, ms([each.elapsed_us for each in told]) - sum(parts)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _added(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sums by position; shorter lists are padded with zeros."""
    longest = max(map(len, lists), default=0)
    return tuple(sum(each[place] for each in lists if place < len(each)) for place in range(longest))
