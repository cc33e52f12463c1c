"""What a model service tells of itself: its load, its passes, its model.

Knows the names; refuses to know who counts.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.core.rounds import Load, ModelInfo
from specdec.telemetry.instruments import Instruments, Points


def observe(service: str, info: ModelInfo, load: Callable[[], Load], busy_s: Callable[[], float]) -> None:
    """``busy_s`` is how long the model thread has worked in all. ``service`` is target or draft."""
    instruments = Instruments()
    attributes = {"service": service}

    def of(value: Callable[[Load], float]) -> Callable[[], Points]:
        return lambda: [(value(load()), attributes)]

    def told() -> Points:
        return [(1, {**attributes, "model": info.name, "digest": info.model_digest[:12], "dtype": info.dtype})]

    def rows() -> Points:
        # Not every engine counts them.
        return [(load().rows, attributes)] if load().rows else []

    gauge, counter = instruments.gauge, instruments.counter
    gauge("specdec.live_sequences", "{sequence}", "Sequences open", of(lambda load: load.live_sequences))
    at_work = "With a pass of the model to come or under way"
    gauge("specdec.waiting_sequences", "{sequence}", at_work, of(lambda load: load.waiting_sequences))
    gauge("specdec.open_streams", "{stream}", "Streams open", of(lambda load: load.open_streams))
    gauge("specdec.kv_slots_used", "{slot}", "KV cache slots taken", of(lambda load: load.kv_slots_used))
    gauge("specdec.kv_slots_total", "{slot}", "KV cache slots in total", of(lambda load: load.kv_slots_total))
    gauge("specdec.model_info", "", "Always 1; the attributes say which model this replica serves", told)
    counter("specdec.passes", "{pass}", "Passes of the model", of(lambda load: load.passes))
    counter("specdec.rows", "{row}", "Rows fed to the model, in all passes", rows)
    counter("specdec.busy", "s", "Time that the model thread worked", lambda: [(busy_s(), attributes)])
