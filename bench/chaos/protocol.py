"""Rows 12 and 20: frames that break the protocol. Knows frames of an untrusted peer; does not know process faults."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import httpx2 as httpx

from bench.chaos import bad_input
from bench.chaos.hostile_requests import Attack
from bench.chaos.http_streams import serves
from bench.chaos.lab import Lab, Process, load_of, until
from bench.chaos.models import DEMO, LanguageModels
from bench.chaos.outcome import Outcome
from bench.chaos.raw import draft_stream, spec, target_stream
from bench.chaos.traffic import Steady, Traffic, check_same, several
from specdec.core.errors import InvalidArgument, OutOfStep
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.v1 import common_pb2, draft_pb2, target_pb2


async def row_12(lab: Lab, seed: int, short: bool) -> Outcome:
    """Duplicate, reordered, stale and future rounds and advances, and unknown and reused sequences arrive in a stream
    with one well-behaved sequence."""
    outcome = Outcome()
    async with lab.deployment() as found:
        await _abused_target(outcome, lab, found.targets[0].address)
        await _abused_draft(outcome, found.drafts[0].address)
        async with Traffic(found.client, several(4, 60, lab.chance)) as traffic:
            check_same(outcome, await traffic.finished(30.0), lab.reference, "requests beside it")
    return outcome


def _round(sequence: int, number: int, base: int, *token_ids: int) -> target_pb2.Round:
    return target_pb2.Round(sequence=sequence, number=number, base=base, tree=common_pb2.TokenTree(token_ids=token_ids))


async def _abused_target(outcome: Outcome, lab: Lab, address: str) -> None:
    prompt = (1, 2, 3)
    known = SequenceSpec(prompt, 3, SamplingParams(0.8), 5)
    ids = list(prompt)
    cases = {
        "duplicate round": [_round(0, 1, 4), _round(0, 1, 4)],
        "reordered rounds": [_round(0, 2, 5), _round(0, 1, 4)],
        "three rounds at once": [_round(0, 1, 4), _round(0, 2, 4, 1, 2), _round(0, 3, 4, 1, 2)],
        "future round": [_round(0, 7, 4)],
        "future base": [_round(0, 1, 99)],
        "base in the prompt": [_round(0, 1, 1)],
        "unknown sequence": [_round(1 << 40, 1, 4)],
    }
    async with target_stream(address) as stream:
        good = 1
        await stream.send(opens=[target_pb2.TargetOpen(sequence=good, spec=spec(prompt))])
        ids.append((await stream.answer(good)).next_token)
        number = 0
        for sequence, (name, rounds) in enumerate(cases.items(), start=2):
            await stream.send(opens=[target_pb2.TargetOpen(sequence=sequence, spec=spec(prompt))])
            await stream.answer(sequence)
            number += 1
            for each in rounds:
                each.sequence = each.sequence or sequence
            await stream.send(rounds=[*rounds, _round(good, number, len(ids))])
            error = await stream.error(rounds[0].sequence)
            named = any(word in str(error) for word in ("expected", "wait for", "open it first"))
            outcome.check(isinstance(error, OutOfStep) and named, f"{name}: {error.reason}, {error}")
            ids.append((await stream.answer(good)).next_token)
        await stream.send(opens=[target_pb2.TargetOpen(sequence=2, spec=spec(prompt))])
        error = await stream.error(2)
        outcome.check(isinstance(error, InvalidArgument), f"reused sequence: {error.reason}")
        # Rounds of ended sequences and second closes are harmless.
        await stream.send(rounds=[_round(3, 2, 5), _round(good, number + 1, len(ids))], closes=[3, 3, 4])
        ids.append((await stream.answer(good)).next_token)
        live = (await load_of(address, "target")).live_sequences
        # The well-behaved sequence, and the one that was opened beside the unknown sequence.
        outcome.check(live == 2, f"sequences left of the broken ones: {live - 2}")
    expected = lab.reference.text(known, len(ids) - len(prompt))
    outcome.check(
        ids == [*prompt, *expected], f"the good sequence of that stream: {len(ids) - 3} tokens, all as expected"
    )


async def _abused_draft(outcome: Outcome, address: str) -> None:
    budget = draft_pb2.DraftBudget(max_nodes=2, max_depth=2)

    def advance(sequence: int, number: int, base: int, *token_ids: int) -> draft_pb2.Advance:
        return draft_pb2.Advance(sequence=sequence, number=number, base=base, token_ids=token_ids, budget=budget)

    cases = {
        "duplicate advance": [advance(0, 1, 4, 9), advance(0, 1, 4, 9)],
        "future advance": [advance(0, 5, 4, 9)],
        "stale base": [advance(0, 1, 3, 9)],
        "future base": [advance(0, 1, 50, 9)],
        "unknown sequence": [advance(1 << 40, 1, 4, 9)],
    }
    async with draft_stream(address) as stream:
        good, base = 1, 3
        await stream.send(opens=[draft_pb2.DraftOpen(sequence=good, spec=spec())])
        await stream.answer(good)
        for number, (name, advances) in enumerate(cases.items(), start=1):
            sequence = number + 1
            base += 1
            await stream.send(opens=[draft_pb2.DraftOpen(sequence=sequence, spec=spec())])
            for each in advances:
                each.sequence = each.sequence or sequence
            await stream.send(advances=[*advances, advance(good, number, base, number)])
            error = await stream.error(advances[0].sequence)
            named = any(word in str(error) for word in ("expected", "open it first"))
            outcome.check(isinstance(error, OutOfStep) and named, f"{name}: {error.reason}, {error}")
            growth = await stream.answer(good)
            outcome.check(growth.advance == number and len(growth.tree.token_ids) == 2, f"its neighbour grew ({name})")


async def row_20(lab: Lab, seed: int, short: bool) -> Outcome:
    """Each service gets 10,000 generated bad frames or requests: random bytes, random fields, mutated valid ones. Then
    orchestrator and gateway get 10,000 requests with hostile contents (schemas, regular expressions, Lark, templates,
    bodies) beside normal streams."""
    outcome = Outcome()
    count = 500 if short else 10_000
    async with lab.deployment(pass_ms=0.0, step_ms=0.0) as found:
        for role, process in [*found.model_services, ("orchestrator", found.orchestrator)]:
            statuses = await bad_input.attack(role, process.address, count, lab.chance)
            _check_refused(outcome, role, statuses, process)
            unnamed = statuses["INVALID_ARGUMENT without a field"]
            outcome.check(not unnamed, f"{role}: {unnamed} refusals that name no field")
        async with Traffic(found.client, several(8, 60, lab.chance)) as traffic:
            check_same(outcome, await traffic.finished(30.0), lab.reference, "good requests after it")
        outcome.at_most("nothing left after", await found.freed(), 2.0)
    await _hostile_contents(outcome, Lab(seed, LanguageModels("torch", DEMO)), count)
    return outcome


def _check_refused(outcome: Outcome, role: str, statuses: Counter[str], process: Process) -> None:
    seen = ", ".join(f"{name} {number}" for name, number in statuses.most_common())
    outcome.check(not {"UNKNOWN", "INTERNAL"} & set(statuses), f"{role}: {seen}")
    outcome.check(process.returncode is None, f"{role} is alive")
    traces = process.tracebacks()
    outcome.check(not traces, f"{role}: {traces} tracebacks in its log")


async def _hostile_contents(outcome: Outcome, lab: Lab, count: int) -> None:
    flags = [f"--tokenizer={DEMO.target}"]
    async with lab.deployment(orchestrator=flags) as found, AsyncExitStack() as stack:
        make = await stack.enter_async_context(lab.processes())
        gateway: Process = make("gateway", f"--orchestrator={found.orchestrator.address}")
        await gateway.start()
        base = f"http://{gateway.address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=20))
        await until(lambda: serves(http), 30.0)
        services = dict([*found.model_services, ("orchestrator", found.orchestrator), ("gateway", gateway)])

        def lost() -> list[str]:
            return [role for role, process in services.items() if process.returncode is not None]

        attack = Attack(found.client, http, lab.chance)
        async with Steady(found.client, 2, 200, lab.chance) as neighbours:
            await attack.run(count, lambda: bool(lost()))
        outcome.check(not lost(), f"lost: {', '.join(lost()) or 'none'} {list(attack.under_way.values()) or ''}")
        if lost():
            return
        outcome.check(not attack.bad, f"{len(attack.bad)} failures by contents {attack.bad[:3] or ''}")
        _check_refused(outcome, "hostile contents", attack.statuses, gateway)
        traces = sum(process.tracebacks() for process in services.values())
        outcome.check(not traces, f"{traces} tracebacks in the logs")
        answers = neighbours.answers
        errors = {str(answer.error) for answer in answers if answer.error}
        outcome.check(not errors, f"{len(answers)} streams beside them {errors or 'without an error'}")
        gaps = [gap for answer in answers for gap in answer.gaps]
        outcome.at_most("longest gap of a stream beside them", max(gaps, default=0.0), 0.25)
        check_same(outcome, answers[:4], lab.reference, "of these streams")
        outcome.at_most("nothing left after", await found.freed(), 10.0)
