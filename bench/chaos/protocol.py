"""Rows 12 and 20: frames that break the protocol. Knows frames of an untrusted peer; does not know process faults."""

from __future__ import annotations

import re
from collections import Counter

from bench.chaos.hostile_requests import Attack
from bench.chaos.http_streams import http_client
from bench.chaos.models import DEMO, LanguageModels
from specdec.core.errors import InvalidArgument, OutOfStep
from specdec.core.sequence import SamplingParams, SequenceSpec
from testing import bad_input
from testing.lab import Process, Role
from testing.out_of_step import refusals
from testing.raw import advance, draft_open, round_, service_at, target_open
from testing.trial import Trial

_GOOD = 1
_FIRST_BAD = 2
_PROMPT = (1, 2, 3)


async def protocol_abuse(trial: Trial) -> None:
    """Duplicate, reordered, stale and future rounds and advances, and unknown and reused sequences arrive in a stream
    with one well-behaved sequence."""
    async with trial.deployment() as running:
        for role, process in running.model_services:
            await _abuse(trial, role, process.address)
        await trial.check_serves(running.client, 4, 60, "requests beside it")


async def _abuse(trial: Trial, role: Role, address: str) -> None:
    ids = list(_PROMPT)
    async with service_at(address, role) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(_GOOD, seed=5) if role == "target" else draft_open(_GOOD)])
        first = await stream.answer(_GOOD)
        ids.append(first.next_token if role == "target" else 0)
        number = 0
        async for name, error, names in refusals(stream, _FIRST_BAD):
            good = isinstance(error, OutOfStep) and re.search(names, str(error))
            trial.check(bool(good), f"{name}: {error.reason}, {error}")
            number += 1
            if role == "target":
                ids.append((await stream.ask(round_(_GOOD, number, len(ids)))).next_token)
            else:
                await stream.send(advances=[advance(_GOOD, number, len(ids), [number])])
                ids.append(number)
                growth = await stream.answer(_GOOD)
                grew = growth.advance == number and len(growth.tree.token_ids) == 2
                trial.check(grew, f"its neighbour grew ({name})")
        await stream.send(opens=[target_open(_FIRST_BAD) if role == "target" else draft_open(_FIRST_BAD)])
        error = await stream.error(_FIRST_BAD)
        trial.check(isinstance(error, InvalidArgument), f"reused sequence: {error.reason}")
        # Second closes, and closes of ended sequences, are harmless.
        await stream.send(closes=[_FIRST_BAD, _FIRST_BAD])
        # The well-behaved sequence, and the one that was opened beside the unknown sequence.
        num_left = (await service.load()).live_sequences - 2
        trial.check(num_left == 0, f"sequences left of the broken ones: {num_left}")
    if role == "target":
        spec = SequenceSpec(_PROMPT, len(_PROMPT), SamplingParams(1.0), 5)
        expected = trial.reference.text(spec, len(ids) - len(_PROMPT))
        same = ids[len(_PROMPT) :] == expected
        trial.check(same, f"the good sequence of that stream: {len(expected)} tokens, all as expected")


async def hostile_contents(trial: Trial) -> None:
    """Each service gets 10,000 generated bad frames or requests: random bytes, random fields, mutated valid ones. Then
    orchestrator and gateway get 10,000 requests with hostile contents (schemas, regular expressions, Lark, templates,
    bodies) beside normal streams."""
    count = 500 if trial.short else 10_000
    async with trial.deployment(pass_ms=0.0, step_ms=0.0) as running:
        for role, process in [*running.model_services, ("orchestrator", running.orchestrator)]:
            statuses = await bad_input.attack(role, process.address, count, trial.chance)
            _check_refused(trial, role, statuses, process)
            num_unnamed = statuses["INVALID_ARGUMENT without a field"]
            trial.check(not num_unnamed, f"{role}: {num_unnamed} refusals that name no field")
        await trial.check_serves(running.client, 8, 60, "good requests after it")
        trial.at_most("nothing left after", await running.freed(), 2.0)
    trial.models = LanguageModels("torch", DEMO)
    await _hostile_contents(trial, count)


def _check_refused(trial: Trial, role: str, statuses: Counter[str], process: Process) -> None:
    shown = ", ".join(f"{name} {number}" for name, number in statuses.most_common())
    trial.check(not {"UNKNOWN", "INTERNAL"} & set(statuses), f"{role}: {shown}")
    trial.check(process.returncode is None, f"{role} is alive")
    trial.check_no_tracebacks([process], f"the log of {role}")


async def _hostile_contents(trial: Trial, count: int) -> None:
    async with trial.deployment(orchestrator=[f"--tokenizer={DEMO.target}"]) as running:
        gateway = running.make("gateway", f"--orchestrator={running.orchestrator.address}")
        await gateway.start()
        services = [*running.processes, gateway]

        def lost() -> list[str]:
            return [process.module for process in services if process.returncode is not None]

        async with http_client(gateway) as http, trial.steady(running.client, 2, 200) as neighbours:
            attack = Attack(running.client, http, trial.chance)
            await attack.run(count, lambda: bool(lost()))
        trial.check(not lost(), f"lost: {', '.join(lost()) or 'none'} {list(attack.under_way.values()) or ''}")
        if lost():
            return
        trial.check(not attack.bad, f"{len(attack.bad)} failures by contents {attack.bad[:3] or ''}")
        _check_refused(trial, "hostile contents", attack.statuses, gateway)
        trial.check_no_tracebacks(services)
        answers = neighbours.answers
        errors = {str(answer.error) for answer in answers if answer.error}
        trial.check(not errors, f"{len(answers)} streams beside them {errors or 'without an error'}")
        gaps = [gap for answer in answers for gap in answer.gaps]
        trial.at_most("longest gap of a stream beside them", max(gaps, default=0.0), 0.25)
        trial.check_same(answers[:4], "of these streams")
        trial.at_most("nothing left after", await running.freed(), 10.0)
