"""Rows 11 and 13: hostile and incompatible drafts. A draft must not be able to change a request's result."""

from __future__ import annotations

from dataclasses import replace

from bench.chaos.outcome import Outcome, percentile
from bench.chaos.raw import target_stream
from specdec.client import Client
from specdec.core.errors import ModelMismatch
from specdec.v1 import common_pb2, target_pb2
from testing import hostile_draft as hostile
from testing.lab import Deployment, Lab, load_of
from testing.traffic import Traffic, ask, check_same, several


async def row_11(lab: Lab, seed: int, short: bool) -> Outcome:
    """A hostile draft, a raw gRPC server, sends random tokens, empty trees and everything that the contract forbids.
    Another one sends heartbeats and never answers, and others send what is legal without end."""
    outcome = Outcome()
    modes = {**hostile.HARMLESS, **hostile.INVALID, **hostile.FLOODS, "no answer": None}
    for name, mode in modes.items():
        draft = hostile.HostileDraft(seed, endless=name in hostile.FLOODS)
        draft.mode = mode
        server, port = await hostile.serve(draft)
        try:
            address = f"127.0.0.1:{port}"
            async with lab.deployment(num_drafts=0, extra_drafts=[address]) as found:
                if name in hostile.FLOODS:
                    await _flooded(outcome, lab, found, name)
                await _abused(outcome, lab, found, name, address, 4 if short else 16)
        finally:
            await server.stop(0)
    return outcome


async def _flooded(outcome: Outcome, lab: Lab, found: Deployment, name: str) -> None:
    """A request during which the draft floods, against requests for which it is ejected already."""
    [asked] = several(1, 100, lab.chance)
    await ask(found.client, replace(asked, num_draft_tokens=0))  # connections and code are warm
    flooded, *others = [await ask(found.client, replace(asked, num_draft_tokens=4)) for _ in range(4)]
    check_same(outcome, [flooded], lab.reference, f"with {name}")
    flooded_s = flooded.ended - flooded.started
    usual_s = percentile((each.ended - each.started for each in others), 0.5)
    outcome.note(f"{name}: {flooded_s * 1e3:.0f} ms, without a draft {usual_s * 1e3:.0f} ms")
    outcome.at_most(f"{name}: time against no draft", flooded_s / usual_s, 1.2, "x")


async def _abused(outcome: Outcome, lab: Lab, found: Deployment, name: str, address: str, count: int) -> None:
    # A number of draft tokens, because the policy may leave a draft unasked.
    asked = [replace(each, num_draft_tokens=4) for each in several(count, 60, lab.chance)]
    async with Traffic(found.client, asked) as traffic:
        answers = await traffic.finished(15.0)
    check_same(outcome, answers, lab.reference, f"with {name}")
    replicas = (await found.client.server_info()).replicas
    problem = next(each.problem for each in replicas if each.address == address)
    if name in hostile.INVALID or name in hostile.FLOODS:
        outcome.check("ejected" in problem, f"{name}: {problem or 'not ejected'}")
    if name == "no answer":
        longest = percentile((gap for answer in answers for gap in answer.gaps), 1.0)
        outcome.at_most("no answer: longest gap", longest, 1.5)


async def row_13(lab: Lab, seed: int, short: bool) -> Outcome:
    """A draft has a vocabulary of 512, its target one of 1024. Then an open frame names another model."""
    outcome = Outcome()
    async with lab.deployment(num_drafts=0) as found:
        async with lab.processes() as make:
            other = make("testing.table_service draft", "--vocab-size=512")
            front = make("orchestrator", f"--target={found.targets[0].address}", f"--draft={other.address}")
            for each in (other, front):
                await each.start()
            for each in (other, front):
                await each.healthy()
            async with Client(front.address) as client:
                async with Traffic(client, several(4 if short else 16, 80, lab.chance)) as traffic:
                    answers = await traffic.finished(30.0)
                check_same(outcome, answers, lab.reference, "by the target alone")
                drafted = sum(answer.sample.finish.speculation.num_draft_tokens for answer in answers)
                outcome.check(not drafted, f"{drafted} draft tokens used")
                replicas = (await client.server_info()).replicas
                problem = next(each.problem for each in replicas if each.role == "draft")
                outcome.check("512" in problem and "1024" in problem, f"the refusal names both: {problem}")
            outcome.check((await load_of(other.address, "draft")).live_sequences == 0, "the draft has no sequences")
        async with target_stream(found.targets[0].address) as stream:
            spec = common_pb2.SequenceSpec(token_ids=[1, 2], num_prompt_tokens=2, model_digest="another")
            spec.sampling.top_p = 1.0
            spec.method = common_pb2.VERIFICATION_METHOD_COUPLED
            await stream.send(opens=[target_pb2.TargetOpen(sequence=1, spec=spec)])
            error = await stream.error(1)
            mine = "table-target" in str(error) and "another" in str(error)
            outcome.check(isinstance(error, ModelMismatch) and mine, f"{error.reason}: {error}")
    return outcome
