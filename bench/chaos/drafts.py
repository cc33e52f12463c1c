"""Rows 11 and 13: hostile and incompatible drafts. A draft must not be able to change a request's result."""

from __future__ import annotations

from dataclasses import replace

from specdec.client import Client
from specdec.core.errors import ModelMismatch
from testing.hostile_draft import ANSWERS, EJECTED, ENDLESS, SILENCE, hostile_draft
from testing.lab import Deployment, load_of, replica_flags, start
from testing.raw import service_at, spec, target_open
from testing.table_model import Table
from testing.traffic import Traffic, ask, percentile
from testing.trial import Trial


async def hostile_draft_service(trial: Trial) -> None:
    """A hostile draft, a raw gRPC server, sends random tokens, empty trees and everything that the contract forbids.
    Another one sends heartbeats and never answers, and others send what is legal without end."""
    for name in (SILENCE, "empty trees", "other tokens", *sorted(EJECTED)):
        async with (
            hostile_draft(Table().info("table-draft"), ANSWERS[name], heartbeats=True) as address,
            trial.deployment(num_drafts=0, orchestrator=[f"--draft={address}"]) as running,
        ):
            if name in ENDLESS:
                await _flooded(trial, running, name)
            await _abused(trial, running, name, address)


async def _flooded(trial: Trial, running: Deployment, name: str) -> None:
    """A request during which the draft floods, against requests for which it is ejected already."""
    [asked] = trial.requests(1, 100)
    await ask(running.client, replace(asked, num_draft_tokens=0))  # connections and code are warm
    flooded, *others = [await ask(running.client, replace(asked, num_draft_tokens=4)) for _ in range(4)]
    trial.check_same([flooded], f"with {name}")
    flooded_s = flooded.ended - flooded.started
    usual_s = percentile((each.ended - each.started for each in others), 0.5)
    trial.note(f"{name}: {flooded_s * 1e3:.0f} ms, without a draft {usual_s * 1e3:.0f} ms")
    trial.at_most(f"{name}: time against no draft", flooded_s / usual_s, 1.2, "x")


async def _abused(trial: Trial, running: Deployment, name: str, address: str) -> None:
    # A number of draft tokens, because the policy may leave a draft unasked.
    asked = [replace(each, num_draft_tokens=4) for each in trial.requests(4 if trial.short else 16, 60)]
    async with Traffic(running.client, asked) as traffic:
        answers = await traffic.finished(15.0)
    trial.check_same(answers, f"with {name}")
    replicas = (await running.client.server_info()).replicas
    problem = next(replica.problem for replica in replicas if replica.address == address)
    if name in EJECTED:
        trial.check("ejected" in problem, f"{name}: {problem or 'not ejected'}")
    if name == SILENCE:
        longest = percentile((gap for answer in answers for gap in answer.gaps), 1.0)
        trial.at_most(f"{name}: longest gap", longest, 1.5)


async def other_models(trial: Trial) -> None:
    """A draft has a vocabulary of 512, its target one of 1024. Then an open frame names another model."""
    async with trial.deployment(num_drafts=0) as running:
        [target] = running.targets
        other = running.make("testing.table_service draft", "--vocab-size=512")
        front = running.make("orchestrator", *replica_flags([target.address], [other.address]))
        await start(other, front)
        async with Client(front.address) as client:
            answers = await trial.check_serves(client, 4 if trial.short else 16, 80, "by the target alone")
            drafted = sum(answer.sample.finish.speculation.num_draft_tokens for answer in answers)
            trial.check(not drafted, f"{drafted} draft tokens used")
            replicas = (await client.server_info()).replicas
            problem = next(replica.problem for replica in replicas if replica.role == "draft")
            trial.check("512" in problem and "1024" in problem, f"the refusal names both: {problem}")
        trial.check((await load_of(other.address, "draft")).live_sequences == 0, "the draft has no sequences")
        async with service_at(target.address, "target") as service:
            stream = service.stream()
            await stream.send(opens=[target_open(1, spec=spec((1, 2), model_digest="another"))])
            error = await stream.error(1)
            named = "table-target" in str(error) and "another" in str(error)
            trial.check(isinstance(error, ModelMismatch) and named, f"{error.reason}: {error}")
