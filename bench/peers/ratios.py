"""The target figures of the project, each computed from rows of one run. A figure that was not measured is absent.

Knows which contenders are compared; does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.contender import Kind
from bench.peers.measuring import Row, by_kind

BATCHES = (4, 16, 32)

KEYS = (
    "grpc_over_assisted",
    "grpc_over_generate",
    "alone_over_generate",
    "alone_over_inprocess",
    *(f"streams_{streams}_over_batch" for streams in BATCHES),
    *(f"speculation_on_over_off_{streams}" for streams in BATCHES),
)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """The ratios by the names in KEYS, in that order."""
    found = by_kind(rows)
    result: dict[str, float] = {}

    def compare(name: str, ours: tuple[Kind, int], *theirs: tuple[Kind, int]) -> None:
        peers = [found[each] for each in theirs if each in found]
        if ours in found and peers:
            result[name] = found[ours].over(max(peers, key=lambda row: row.tokens_per_s))

    compare("grpc_over_assisted", (Kind.OURS, 1), (Kind.ASSISTED, 1))
    compare("grpc_over_generate", (Kind.OURS, 1), (Kind.GENERATE, 1))
    compare("alone_over_generate", (Kind.ALONE, 1), (Kind.GENERATE, 1))
    compare("alone_over_inprocess", (Kind.ALONE, 1), (Kind.LOOP_ALONE, 1))
    for streams in BATCHES:
        compare(f"streams_{streams}_over_batch", (Kind.OURS, streams), (Kind.PADDED, streams))
        compare(f"speculation_on_over_off_{streams}", (Kind.OURS, streams), (Kind.ALONE, streams))
    return {name: round(result[name], 3) for name in KEYS if name in result}
