"""The time that a pass takes on its device."""

from __future__ import annotations

import time

import torch


class PassTimer:
    """The time from here until the device has computed all that was launched before ``stop``.

    A GPU computes behind the host, which does not wait for it here: the GPU notes the times itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._note()

    def stop(self) -> None:
        self._note()

    def elapsed_s(self) -> float:
        """To be called after ``stop``. Waits until the device is so far."""
        if self._events:
            start, end = self._events
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        start_s, end_s = self._times
        return end_s - start_s

    def _note(self) -> None:
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[-1].record(torch.cuda.current_stream(self._device))
