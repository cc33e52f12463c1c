"""The result of one mode in one situation, from the statistics that the orchestrator sends at the end of a sample.

Knows how counts become rates; does not know how they were measured and are shown.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.v1.generation_pb2 import SpeculationStats


@dataclass(frozen=True, slots=True)
class Run:
    """Concurrent samples, and their speculation statistics."""

    num_tokens: int
    seconds: float
    stats: tuple[SpeculationStats, ...]


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
        num_hits = self.num_bonus_hits + sum(self.num_correction_hits)
        return _share(num_hits, self.num_bonuses + sum(self.num_corrections))

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
    outcomes: Outcomes = Outcomes()
    round_ms: RoundMs = RoundMs()
    drafts_per_round: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The median of the runs."""
        return statistics.median(self.rates)

    @staticmethod
    def of(
        pair: str, temperature: float, situation: str, round_trip_ms: float | None, mode: str, runs: Sequence[Run]
    ) -> Row:
        stats = [sample for run in runs for sample in run.stats]
        num_rounds = max(1, _total(stats, "num_rounds"))
        num_drafts = _total(stats, "num_drafts")
        return Row(
            pair,
            temperature,
            situation,
            round_trip_ms,
            mode,
            tuple(run.num_tokens / run.seconds for run in runs),
            draft_tokens_per_round=_total(stats, "num_draft_tokens") / num_rounds,
            accepted_per_round=_total(stats, "num_accepted_tokens") / num_rounds,
            tokens_per_round=sum(run.num_tokens for run in runs) / num_rounds,
            on_time=_share(_total(stats, "num_drafts_on_time"), num_drafts),
            outcomes=Outcomes(
                _total(stats, "num_bonuses"),
                _total(stats, "num_bonus_hits"),
                _by_position([sample.num_corrections_per_pos for sample in stats]),
                _by_position([sample.num_correction_hits_per_pos for sample in stats]),
            ),
            round_ms=_round_ms(stats),
            drafts_per_round=num_drafts / num_rounds,
        )


def _round_ms(stats: Sequence[SpeculationStats]) -> RoundMs:
    # The clock starts with the first verdict, so the first round has no time.
    num_rounds = max(1, _total(stats, "num_rounds") - len(stats))
    names = ("draft_wait_us", "target_queue_us", "target_pass_us", "target_sample_us")
    wait_ms, queue_ms, pass_ms, sample_ms = (_total(stats, name) / num_rounds / 1e3 for name in names)
    rest_ms = _total(stats, "elapsed_us") / num_rounds / 1e3 - wait_ms - queue_ms - pass_ms - sample_ms
    return RoundMs(wait_ms, queue_ms, pass_ms, sample_ms, max(0.0, rest_ms))


def _total(stats: Sequence[SpeculationStats], name: str) -> int:
    return sum(getattr(sample, name) for sample in stats)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _by_position(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sums by position; shorter lists are padded with zeros."""
    return tuple(map(sum, itertools.zip_longest(*lists, fillvalue=0)))
