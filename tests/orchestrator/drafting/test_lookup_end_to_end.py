"""Where the text repeats itself the target makes fewer passes than tokens without any draft; where it does not, nothing
is looked up. The text is the target's either way."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import sample as sample_
from orchestrator.rounds import RoundPlan
from orchestrator.verifying.target_client import TargetClient
from specdec.core.rounds import LOOKUP
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from specdec.v1 import common_pb2
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.self_draft.text_lookup import chain_of
from testing.misbehaving import Misbehaving
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import Cluster, cluster
from tests.models.table_runner import TableRunner

PROMPT = [1, 2, 3]
LENGTH = 300
PERIOD = 30


class Silent(TableDrafter):
    """Never answers, until it is released."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.released = threading.Event()

    def grow(self, sequences: Any) -> Any:
        self.released.wait(60)
        return super().grow(sequences)


@pytest.fixture(autouse=True)
def _nothing_is_verified_among_autonomous_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that is handed over then would be dropped without a word."""
    ask = TargetClient._continue

    async def checked(client: TargetClient, lane: Any, sequence: Any, tree: Any, *, plan: RoundPlan) -> Any:
        assert not (tree and plan.num_autonomous)
        if tree and client._rounds.pending:
            [sent] = client._rounds.pending
            assert sent.tree.descend(sequence.ids[sent.base :]).prefix(sent.max_nodes) == tree, "what was sent early"
        return await ask(client, lane, sequence, tree, plan=plan)

    monkeypatch.setattr(TargetClient, "_continue", checked)


async def sample(running: Cluster, **fields: Any) -> Any:
    [one] = await running.client.generate(
        **{"token_ids": {"token_ids": PROMPT}, "max_tokens": LENGTH, "seed": 5} | fields
    )
    return one


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["none", "dead", "silent"])
async def test_without_a_draft_a_text_that_repeats_itself_takes_fewer_passes_than_tokens(draft, temperature):
    table = Table(period=PERIOD)
    fields = {"temperature": temperature}
    async with cluster([TableVerifier(table)]) as running:
        alone = await sample(running, num_draft_tokens=0, **fields)
    verifier, silent = Misbehaving(TableVerifier(table, pass_s=0.01)), Silent(table)
    drafters = {"none": [], "dead": [TableDrafter(table)], "silent": [silent]}[draft]
    async with cluster([verifier], drafters, num_draft_tokens=None, patient=False) as running:
        if draft == "dead":
            await running.drafts[0].stop()
        told = await sample(running, **fields)
        assert list(told.token_ids) == list(alone.token_ids)
        counts = told.finish.speculation
        silent.released.set()
        assert verifier.num_passes < LENGTH
        assert counts.num_accepted_lookup_tokens > 0
        assert counts.num_accepted_lookup_tokens == counts.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("further", [{}, {"num_ahead_tokens": 40}, {"num_siblings": 2}], ids=str)
async def test_beside_a_draft_that_lives_the_text_is_the_same_and_who_got_what_accepted_is_told(further, temperature):
    table = Table(period=PERIOD, acceptance=0.7)
    fields = {"temperature": temperature}
    async with cluster([TableVerifier(table)]) as running:
        alone = await sample(running, num_draft_tokens=0, **fields)
    verifier, drafter = TableVerifier(table, pass_s=0.01), TableDrafter(table, step_s=0.001)
    async with cluster([verifier], [drafter], num_draft_tokens=None, **further) as running:
        told = [await sample(running, **fields) for _ in range(2)]
        draft = running.orchestrator.drafts.replicas[0].tally
    assert [list(each.token_ids) for each in told] == [list(alone.token_ids)] * 2
    counts = [each.finish.speculation for each in told]
    assert sum(each.num_lookup_tokens for each in counts) > 0
    by_draft = [each.num_draft_tokens - each.num_lookup_tokens for each in counts]
    accepted = [each.num_accepted_tokens - each.num_accepted_lookup_tokens for each in counts]
    assert (draft.num_draft_tokens, draft.num_accepted_tokens) == (sum(by_draft), sum(accepted))
    assert 0 < sum(accepted) < sum(by_draft)


class LooksUp(TableVerifier):
    """A target that looks up in its own texts."""

    def __init__(self, table: Table) -> None:
        super().__init__(table, pass_s=0.01, self_drafts=True)
        self.info = replace(self.info, self_draft=LOOKUP)
        self.num_passes = 0
        self._rates = HitRates()
        self._lookups: dict[int, PromptLookup] = {}

    def close(self, state: Any) -> None:
        self._lookups.pop(id(state), None)
        super().close(state)

    def verify(self, jobs: Any) -> Any:
        self.num_passes += 1
        return super().verify(jobs)

    def _drafted(self, job: Any) -> Any:
        lookup = self._lookups.setdefault(id(job.state), PromptLookup(self._rates))
        tree = chain_of(lookup, job.ids, job.self_draft_nodes)
        return replace(job, tree=tree, self_draft_nodes=len(tree))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """That targets were asked for."""
    submit, rounds = TargetEngine.submit, []

    def noting(engine: TargetEngine, key: Any, round_: Any, arrived: float | None = None) -> None:
        rounds.append(round_)
        submit(engine, key, round_, arrived)

    monkeypatch.setattr(TargetEngine, "submit", noting)
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("named", [{}, {"num_draft_tokens": 4}], ids=str)
async def test_a_target_that_looks_up_decodes_what_repeats_itself_in_few_passes_and_fewer_rounds(
    temperature, named, rounds
):
    table = Table(period=PERIOD)
    async with cluster([TableVerifier(table)]) as running:
        alone = await sample(running, num_draft_tokens=0, temperature=temperature)
    verifier = LooksUp(table)
    async with cluster([verifier], num_draft_tokens=None) as running:
        for _ in range(3):  # at first a draft is looked for now and then
            num_passes, num_rounds = verifier.num_passes, len(rounds)
            answer = await sample(running, temperature=temperature, **named)
    counts = answer.finish.speculation
    assert list(answer.token_ids) == list(alone.token_ids)
    assert counts.num_accepted_self_draft_tokens == counts.num_accepted_tokens > LENGTH / 3
    assert not counts.num_lookup_tokens
    assert verifier.num_passes - num_passes < LENGTH / 2
    assert len(rounds) - num_rounds < (verifier.num_passes - num_passes) / 2


@pytest.mark.slow
async def test_past_answers_are_still_proposed_to_a_target_that_looks_up():
    async with cluster([LooksUp(Table())], num_draft_tokens=None, lookup_history=10_000) as running:
        first, again = [await sample(running) for _ in range(2)]
    assert list(again.token_ids) == list(first.token_ids)
    assert again.finish.speculation.num_accepted_lookup_tokens > LENGTH / 2
    assert not again.finish.speculation.num_self_draft_tokens


async def test_where_there_is_a_draft_too_a_named_number_of_tokens_is_the_drafts():
    table = Table(period=PERIOD)
    async with cluster([LooksUp(table)], [TableDrafter(table)]) as running:
        counts = (await sample(running, num_draft_tokens=4)).finish.speculation
    assert counts.num_draft_tokens > LENGTH / 2
    assert not counts.num_self_draft_tokens


@pytest.mark.parametrize("method", ["TOKEN", "BLOCK"])
async def test_where_a_proposal_may_not_be_chosen_for_its_content_nothing_is_looked_up(method, monkeypatch):
    made = []

    def noting(*rates, **options):
        made.append(rates)
        return PromptLookup(*rates, **options)

    monkeypatch.setattr(sample_, "PromptLookup", noting)
    async with cluster([LmVerifier(TableRunner(seed=1))], num_draft_tokens=None) as running:
        verification = getattr(common_pb2, f"VERIFICATION_METHOD_{method}")
        fields = {"max_tokens": 20, "token_ids": {"token_ids": PROMPT * 5}}
        await sample(running, verification=verification, temperature=1.0, **fields)
        assert not made
        await sample(running, num_draft_tokens=4, temperature=1.0, **fields)
        assert not made, "the client named a number"
        await sample(running, verification=verification, temperature=0.0, **fields)
        assert len(made) == 1


async def test_a_text_that_does_not_repeat_itself_is_left_alone():
    table = Table()
    async with cluster([TableVerifier(table, pass_s=0.003)], num_draft_tokens=None) as running:
        told = await sample(running)
    text = [*PROMPT, *told.token_ids]
    assert len(set(itertools.pairwise(text))) == len(text) - 1, "nothing came twice"
    assert told.finish.speculation.num_draft_tokens == 0
