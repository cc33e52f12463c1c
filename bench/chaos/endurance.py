"""Row 22: many short requests. Knows which resources must not grow; causes no faults."""

from __future__ import annotations

from bench.soak import soak
from testing.trial import Trial

_MIN_REQUESTS_FOR_SLOPE = 20_000
"""With fewer requests, memory still grows because processes warm up."""


async def many_requests(trial: Trial) -> None:
    """100,000 short requests run, 64 at a time, and a tenth of them is cancelled at random. Resources are read ten
    times; the first five readings are the warm-up."""
    requests = 2_000 if trial.short else 100_000
    soaked = await soak(requests, 64, 0.1, trial.chance)
    for name, readings in soaked.readings.items():
        slope = soaked.kib_per_10000(name)
        if requests >= _MIN_REQUESTS_FOR_SLOPE:
            trial.at_most(f"{name}: grows per 10,000", slope / 1024, 1.0, "MiB")
        else:
            trial.note(f"{name}: too few requests for a slope")
        trial.note(f"{name}: {readings[0].rss_kib / 1024:.1f} .. {readings[-1].rss_kib / 1024:.1f} MiB")
        for what in ("descriptors", "threads", "tasks"):
            first, last = soaked.levels(name, what)
            # One may be opened or closed at the moment of the reading.
            trial.check(last - first <= 1, f"{name}: {what} {first} .. {last}")
    streams = {f"{role}_streams": 1 for role in ("target", "draft")}  # the orchestrator's link
    left = {what: count for what, count in soaked.left.items() if count != streams.get(what, 0)}
    trial.check(not left, f"left behind: {left or 'nothing'}")
