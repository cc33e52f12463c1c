"""Row 23: a trace collector, a DNS server and a clock that fail. Knows what services depend on outside the project;
does not know faults of the services."""

from __future__ import annotations

import asyncio
import socket
import time

from bench.chaos.clock import Clock
from bench.chaos.dns_deployment import Named
from bench.chaos.outcome import Outcome
from testing.dns import Mood
from testing.lab import Lab
from testing.traffic import Steady, added_gaps, check_same, note_gaps

_RESOLVES_EVERY_S = 5.0
_DAY_S = 86_400
_NO_EFFECT_S = 1.0
"""A busy machine may delay a process for this long; waiting for a name or a collector takes at least 5 s."""


async def row_23(lab: Lab, seed: int, short: bool) -> Outcome:
    """Under load, for 8 s each, the trace collector is down, then silent. Names are unknown, the DNS server fails, then
    is silent, and an orchestrator starts without DNS. The wall clock jumps one day ahead, two days back, and to the
    right time."""
    outcome = Outcome()
    phase_s = _RESOLVES_EVERY_S + (1.0 if short else 3.0)
    clock = await Clock.create()
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        async with Named(lab, num_targets=2) as found:
            names = found.names
            names.addresses["collector"] = ["127.0.0.1"]
            endpoint = f"OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:{collector.getsockname()[1]}"
            await found.start(["env", endpoint, "OTEL_BSP_SCHEDULE_DELAY=50", *(clock.prefix if clock else ())])
            async with Steady(found.client, 4, 200, lab.chance) as load:

                async def phase(what: str) -> None:
                    since = time.monotonic()
                    await asyncio.sleep(phase_s)
                    gaps = added_gaps(load.answers, since, time.monotonic())
                    note_gaps(outcome, gaps, _NO_EFFECT_S, f"{what}: added gap")

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
                    outcome.check(
                        names.num_unanswered > before, f"{names.num_unanswered - before} DNS queries not answered"
                    )
                names.mood = Mood.FAILS
                late = found.add("orchestrator")
                await late.start()
                await late.healthy()
                names.mood = Mood.ANSWERS
                outcome.at_most(
                    "started without names: uses all after", await found.used(late), _RESOLVES_EVERY_S + 3.0
                )
                if clock is None:
                    outcome.note("no C compiler here: the clock was not tested")
                else:
                    for seconds in (_DAY_S, -_DAY_S, 0):
                        clock.jump(seconds)
                        ahead_s = await clock.ahead_s()
                        outcome.check(abs(ahead_s - seconds) < 60.0, f"the clock is {ahead_s:.0f} s ahead")
                        await phase(f"clock {seconds:+d} s")
            check_same(outcome, load.answers, lab.reference)
            replays = sum(answer.num_replays for answer in load.answers if answer.sample.finished)
            outcome.check(not replays, f"{replays} replays")
            await asyncio.gather(*(each.stop() for each in found.processes))
            ends = {each.returncode for each in found.processes}
            outcome.check(ends == {0}, f"exit statuses: {ends}")
            outcome.check(not sum(each.tracebacks() for each in found.processes), "no tracebacks in the logs")
    return outcome
