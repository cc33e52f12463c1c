"""Metrics of a model service: its load, its passes, its model."""

from __future__ import annotations

from collections.abc import Callable

from specdec.core.rounds import Load, ModelInfo
from specdec.telemetry.instruments import Instruments, Points


def observe(service: str, info: ModelInfo, load: Callable[[], Load], busy_s: Callable[[], float]) -> None:
    """Register the metrics. ``service`` is target or draft; ``busy_s`` is the model thread's total working time."""
    instruments = Instruments()
    attributes = {"service": service}

    def of(value: Callable[[Load], float]) -> Callable[[], Points]:
        return lambda: [(value(load()), attributes)]

    def model() -> Points:
        return [(1, {**attributes, "model": info.name, "digest": info.model_digest[:12], "dtype": info.dtype})]

    def rows() -> Points:
        # Some engines do not count rows.
        return [(load().rows, attributes)] if load().rows else []

    gauge, counter = instruments.gauge, instruments.counter
    gauge("specdec.live_sequences", "{sequence}", "Open sequences", read=of(lambda load: load.live_sequences))
    at_work = "Sequences in the current pass of the model or waiting for one"
    gauge("specdec.waiting_sequences", "{sequence}", at_work, read=of(lambda load: load.waiting_sequences))
    gauge("specdec.open_streams", "{stream}", "Open streams", read=of(lambda load: load.open_streams))
    gauge("specdec.kv_slots_used", "{slot}", "KV cache slots in use", read=of(lambda load: load.kv_slots_used))
    gauge("specdec.kv_slots_total", "{slot}", "KV cache slots in total", read=of(lambda load: load.kv_slots_total))
    gauge("specdec.model_info", "", "Always 1; the attributes say which model this replica serves", read=model)
    counter("specdec.passes", "{pass}", "Passes of the model", read=of(lambda load: load.passes))
    counter("specdec.rows", "{row}", "Input rows of all passes", read=rows)
    counter("specdec.busy", "s", "Working time of the model thread", read=lambda: [(busy_s(), attributes)])
