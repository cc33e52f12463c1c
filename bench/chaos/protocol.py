"""Rows 12 and 20: frames that break the protocol. Knows frames of an untrusted peer; does not know process faults."""

from __future__ import annotations

from bench.chaos import bad_input
from bench.chaos.lab import Lab, load_of
from bench.chaos.outcome import Outcome
from bench.chaos.raw import draft_stream, spec, target_stream
from bench.chaos.traffic import Traffic, check_same, several
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
    return target_pb2.Round(sequence=sequence, round=number, base=base, tree=common_pb2.TokenTree(token_ids=token_ids))


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
        return draft_pb2.Advance(sequence=sequence, advance=number, base=base, token_ids=token_ids, budget=budget)

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
    """Each service gets 10,000 generated bad frames or requests: random bytes, random fields, mutated valid ones."""
    outcome = Outcome()
    count = 500 if short else 10_000
    async with lab.deployment(pass_ms=0.0, step_ms=0.0) as found:
        for role, process in [*found.model_services, ("orchestrator", found.orchestrator)]:
            statuses = await bad_input.attack(role, process.address, count, lab.chance)
            seen = ", ".join(f"{name} {number}" for name, number in statuses.most_common())
            outcome.check(not {"UNKNOWN", "INTERNAL"} & set(statuses), f"{role}: {seen}")
            outcome.check(process.returncode is None, f"{role} is alive")
            unnamed = statuses["INVALID_ARGUMENT without a field"]
            outcome.check(not unnamed, f"{role}: {unnamed} refusals that name no field")
            traces = process.tracebacks()
            outcome.check(not traces, f"{role}: {traces} tracebacks in its log")
        async with Traffic(found.client, several(8, 60, lab.chance)) as traffic:
            check_same(outcome, await traffic.finished(30.0), lab.reference, "good requests after it")
        outcome.at_most("nothing left after", await found.freed(), 2.0)
    return outcome
