"""Row 23: a trace collector, a DNS server and a clock that fail. Knows what services depend on outside the project;
does not know faults of the services."""

from __future__ import annotations

import asyncio
import socket
import time

from bench.chaos.clock import Clock
from bench.chaos.dns_deployment import Named
from testing.dns import Mood
from testing.lab import start
from testing.traffic import added_gaps
from testing.trial import Trial, num_replays

_RESOLVES_EVERY_S = 5.0
_DAY_S = 86_400
_NO_EFFECT_S = 1.0
"""A busy machine may delay a process for this long; waiting for a name or a collector takes at least 5 s."""


async def failing_surroundings(trial: Trial) -> None:
    """Under load, for 8 s each, the trace collector is down, then silent. Names are unknown, the DNS server fails, then
    is silent, and an orchestrator starts without DNS. The wall clock jumps one day ahead, two days back, and to the
    right time."""
    phase_s = _RESOLVES_EVERY_S + (1.0 if trial.short else 3.0)
    clock = await Clock.create()
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        async with Named(trial, num_targets=2) as running:
            names = running.names
            names.addresses["collector"] = ["127.0.0.1"]
            endpoint = f"OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:{collector.getsockname()[1]}"
            await running.start(["env", endpoint, "OTEL_BSP_SCHEDULE_DELAY=50", *(clock.prefix if clock else ())])
            async with trial.steady(running.client, 4, 200) as load:

                async def phase(what: str) -> None:
                    since = time.monotonic()
                    await asyncio.sleep(phase_s)
                    gaps = added_gaps(load.answers, since, time.monotonic())
                    trial.note_gaps(gaps, _NO_EFFECT_S, f"{what}: added gap")

                await phase("collector down")
                collector.listen(16)
                await phase("collector silent")
                known = dict(names.addresses)
                names.addresses.clear()
                await phase("names unknown")
                names.addresses |= known
                for mood, what in ((Mood.FAILS, "names fail"), (Mood.IS_SILENT, "names silent")):
                    names.mood = mood
                    before = names.num_unanswered
                    await phase(what)
                    num_unanswered = names.num_unanswered - before
                    trial.check(num_unanswered > 0, f"{num_unanswered} DNS queries not answered")
                names.mood = Mood.FAILS
                late = running.add("orchestrator")
                await start(late)
                names.mood = Mood.ANSWERS
                used_s = await running.used(late)
                trial.at_most("started without names: uses all after", used_s, _RESOLVES_EVERY_S + 3.0)
                if clock is None:
                    trial.note("no C compiler here: the clock was not tested")
                else:
                    for seconds in (_DAY_S, -_DAY_S, 0):
                        clock.jump(seconds)
                        ahead_s = await clock.ahead_s()
                        trial.check(abs(ahead_s - seconds) < 60.0, f"the clock is {ahead_s:.0f} s ahead")
                        await phase(f"clock {seconds:+d} s")
            trial.check_same(load.answers)
            trial.check(not num_replays(load.answers), f"{num_replays(load.answers)} replays")
            await asyncio.gather(*(process.stop() for process in running.processes))
            ends = {process.returncode for process in running.processes}
            trial.check(ends == {0}, f"exit statuses: {ends}")
            trial.check_no_tracebacks(running.processes)
