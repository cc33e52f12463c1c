"""What a soak counts as a leak."""

import pytest

from bench.soak import Reading, Soaked


def soaked(threads: list[int]) -> Soaked:
    return Soaked(
        {"orchestrator": [Reading(n, "orchestrator", 80_000, 20, count, 30) for n, count in enumerate(threads)]}, {}
    )


@pytest.mark.parametrize(
    ("late", "levels"),
    [
        ([10, 10, 10, 10, 12], (10, 10)),  # of a pool
        ([12, 10, 11, 10, 10], (10, 10)),
        ([10, 11, 12, 13, 14], (10, 13)),  # a leak
        ([10, 10, 10, 12, 12], (10, 12)),
    ],
)
def test_a_leak_stays_and_the_threads_of_a_pool_come_and_go(late, levels):
    assert soaked([1, 2, 3, 4, 5, *late]).levels("orchestrator", "threads") == levels
