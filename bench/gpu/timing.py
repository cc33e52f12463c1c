"""Times of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""On a CPU the stages compute the same with small sizes, to see that they run."""

ON_GPU = DEVICE.type == "cuda"


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def us_of(work: Callable[..., object], *given: object, repeats: int = 20) -> float:
    """Median time of one call on the device, in microseconds, after two that warm up."""
    for _ in range(2):
        work(*given)
    times = []
    for _ in range(repeats if ON_GPU else 2):
        wait()
        started = time.perf_counter()
        work(*given)
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def us_in_a_row(work: Callable[..., object], *given: object, repeats: int = 100) -> float:
    """Mean time of a call among many that are launched without waiting, in microseconds."""
    repeats = repeats if ON_GPU else 2
    work(*given)
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work(*given)
    wait()
    return (time.perf_counter() - started) / repeats * 1e6


def bandwidth() -> float:
    """Bytes that the device reads in a second, by the sum of a large tensor."""
    numbers = torch.ones((1 << 30) if ON_GPU else (1 << 20), dtype=torch.float32, device=DEVICE)
    return numbers.nbytes / us_in_a_row(numbers.sum, repeats=10) * 1e6
