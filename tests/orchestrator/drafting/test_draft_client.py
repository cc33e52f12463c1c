"""How long a draft is waited for."""

import asyncio
import time

import pytest

from orchestrator.drafting import draft_client
from orchestrator.drafting.draft_client import DraftClient
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.load_score import LoadScore
from orchestrator.replicas.replica import Tally
from orchestrator.sequence import Sequence
from specdec.core.errors import Overloaded, PassFailed, ReplicaLost
from specdec.core.rounds import AHEAD, Budget, Growth, GrowthEnd, ModelInfo
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, TokenTree
from testing.patience import PATIENCE_S
from tests.models.fake_peers import commit, new_sequence

DEADLINE_S = 0.2


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def open(self, sequence, messages) -> None:
        self.sent.extend(messages)

    def send(self, entry) -> None:
        self.sent.append(entry)

    def leave(self, lane) -> None: ...


class FakeLoad(LoadScore):
    def __init__(self) -> None:
        super().__init__()
        self.growths: list[float] = []

    def observe_growth(self, seconds: float) -> None:
        self.growths.append(seconds)


class FakeReplica:
    def __init__(self) -> None:
        self.link = FakeLink()
        self.lanes: list[Lane] = []
        self.tally = Tally()
        self.info: ModelInfo | None = None
        self.load = FakeLoad()

    def lane(self) -> Lane:
        self.lanes.append(Lane(self.link, len(self.lanes)))
        return self.lanes[-1]

    def can(self, needs: frozenset[str]) -> bool:
        return self.info is not None and needs <= {*self.info.capabilities}

    def observe_latency(self, latency_s: float) -> None: ...


class FakePool:
    def __init__(self) -> None:
        self.replica = FakeReplica()

    def pick(self, avoid: FakeReplica | None, needs: frozenset[str], prefixes: tuple[bytes, ...]) -> FakeReplica:
        return self.replica

    def count_open(self, replica: FakeReplica, prefixes: tuple[bytes, ...]) -> None: ...


def asked(temperature: float = 0.0, method: Method = Method.COUPLED) -> tuple[DraftClient, Sequence, FakeReplica]:
    pool = FakePool()
    sequence = new_sequence((1, 2), 99, method, temperature)
    client = DraftClient(pool)
    assert client.advance(sequence, Budget(4, 4))
    return client, sequence, pool.replica


def answer(client: DraftClient, replica: FakeReplica, sequence: Sequence, advance: int | None = None) -> Growth:
    number = client.num_advances if advance is None else advance
    growth = Growth(number, sequence.base, (), TokenTree.chain([5]), GrowthEnd.BUDGET)
    replica.lanes[-1].put(growth)
    return growth


async def test_what_a_growth_took_is_told_and_whether_a_prefill_was_in_it():
    client, sequence, replica = asked()
    answer(client, replica, sequence)
    assert await client.growth(sequence, DEADLINE_S)
    commit(sequence, 5, 6)
    assert client.take_answer() is None
    before = time.monotonic()
    client.advance(sequence, Budget(3, 3))
    answer(client, replica, sequence)
    took_s = time.monotonic() - before
    await asyncio.sleep(0.02)  # a slow client: not the draft's fault
    assert await client.growth(sequence, DEADLINE_S)
    num_tokens, seconds = client.take_answer()
    assert num_tokens == 3
    assert seconds <= took_s
    assert client.take_answer() is None


async def test_a_round_waits_no_longer_than_it_pays_and_the_late_answer_still_comes():
    client, sequence, replica = asked()
    first = answer(client, replica, sequence)
    assert await client.growth(sequence, DEADLINE_S) is first
    commit(sequence, 5)
    client.advance(sequence, Budget(3, 3))
    assert await client.growth(sequence, DEADLINE_S) is None
    num_tokens, seconds = client.take_answer()
    assert num_tokens == 3
    assert seconds > 1.2 * DEADLINE_S, "it may need longer than was waited"
    commit(sequence, 6)
    assert client.advance(sequence, Budget(2, 2)), "it is still asked"
    late, newest = answer(client, replica, sequence, advance=1), answer(client, replica, sequence)
    assert await client.growth(sequence, DEADLINE_S) is late
    assert await client.growth(sequence, DEADLINE_S) is newest
    assert client.take_answer()[0] == 2
    assert len(replica.lanes) == 1


async def test_a_draft_of_which_nothing_is_asked_is_told_of_many_tokens_at_a_time():
    client, sequence, replica = asked()
    answer(client, replica, sequence)
    await client.growth(sequence, DEADLINE_S)
    sent = replica.link.sent
    sent.clear()
    for number in range(150):
        commit(sequence, number)
        client.catch_up(sequence)
    assert [list(each.token_ids) for each in sent] == [list(range(64)), list(range(64, 128))]
    assert all(each.budget.max_nodes == 0 for each in sent)
    client.advance(sequence, Budget(4, 4))
    assert list(sent[-1].token_ids) == list(range(128, 150))


@pytest.mark.parametrize(("num_new", "tells"), [(9, True), (40, False)])
async def test_what_takes_in_much_text_first_is_no_measure_of_growing(num_new, tells):
    client, sequence, replica = asked()
    answer(client, replica, sequence)
    await client.growth(sequence, DEADLINE_S)
    for number in range(num_new):
        commit(sequence, number)
        client.catch_up(sequence)
    client.advance(sequence, Budget(3, 3))
    answer(client, replica, sequence)
    await client.growth(sequence, DEADLINE_S)
    assert bool(client.take_answer()) is tells


async def test_a_draft_that_was_never_needed_is_never_told():
    pool = FakePool()
    client, sequence = DraftClient(pool), new_sequence((1,), 99, temperature=0.0)
    commit(sequence, *range(20))
    client.catch_up(sequence)
    assert not pool.replica.lanes


async def test_what_a_late_draft_was_asked_is_not_measured_by_what_it_is_told_later():
    """That once was booked as a draft that took as long as nothing had been asked of it."""
    client, sequence, replica = asked()
    answer(client, replica, sequence)
    await client.growth(sequence, DEADLINE_S)
    commit(sequence, 5)
    client.advance(sequence, Budget(3, 3))
    assert await client.growth(sequence, DEADLINE_S) is None
    client.take_answer()
    commit(sequence, *range(70))
    client.catch_up(sequence)
    replica.lanes[-1].put(Growth(client.num_advances, sequence.base, (), EMPTY_TREE, GrowthEnd.BUDGET))
    assert len(list(client.arrived())) == 1
    assert client.take_answer() is None


async def test_drafts_are_compared_by_the_time_of_one_token():
    client, _, replica = asked()
    replica.observe_latency = (told := []).append
    client.compare(0.01)
    assert told == [0.01]


async def test_a_draft_that_refuses_a_text_is_not_asked_to_take_it_in_again_at_once():
    client, sequence, replica = asked()
    replica.lanes[-1].put(Overloaded("no room", retry_after_s=60.0))
    assert await client.growth(sequence, DEADLINE_S) is None
    commit(sequence, 5)
    assert not client.advance(sequence, Budget(4, 4))
    assert len(replica.lanes) == 1
    assert client._paused_until > time.monotonic() + 50


async def test_a_draft_that_is_lost_is_asked_elsewhere_at_once():
    client, sequence, replica = asked()
    replica.lanes[-1].put(ReplicaLost("gone"))
    assert await client.growth(sequence, DEADLINE_S) is None
    commit(sequence, 5)
    assert client.advance(sequence, Budget(4, 4))
    assert len(replica.lanes) == 2


@pytest.mark.parametrize("lost", [PassFailed("failed"), ReplicaLost("gone")])
async def test_a_text_under_which_drafts_are_lost_twice_in_a_row_is_kept_from_them_for_a_while(lost):
    """It may be what fails them. An answer in between clears it, and so does having asked for nothing."""
    client, sequence, replica = asked()
    for number in range(3):
        replica.lanes[-1].put(lost)
        assert await client.growth(sequence, DEADLINE_S) is None
        commit(sequence, number)
        assert client.advance(sequence, Budget(4, 4))
        answer(client, replica, sequence)
        await client.growth(sequence, DEADLINE_S)
    for _ in range(3):
        replica.lanes[-1].put(lost)
        assert not list(client.arrived())
        assert client.advance(sequence, Budget())
        client._asked = None
    client.advance(sequence, Budget(4, 4))
    for again in (True, False):
        replica.lanes[-1].put(lost)
        assert await client.growth(sequence, DEADLINE_S) is None
        commit(sequence, 5)
        assert client.advance(sequence, Budget(4, 4)) is again


async def test_a_text_that_outgrows_the_drafts_context_leaves_it():
    pool = FakePool()
    pool.replica.info = ModelInfo("d", "", 9, "", 4)
    client = DraftClient(pool)
    sequence = new_sequence((1, 2), 99)
    assert client.advance(sequence, Budget(4, 4))
    commit(sequence, 5, 6, 7)
    left: list[Lane] = []
    pool.replica.link.leave = left.append
    assert not client.advance(sequence, Budget(4, 4))
    assert left == pool.replica.lanes
    assert not client.advance(sequence, Budget(4, 4))
    assert len(pool.replica.lanes) == 1, "and is not opened there again"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_late_draft_is_done_without_where_that_cannot_bias(monkeypatch, temperature):
    monkeypatch.setattr(draft_client, "_PATIENCE_S", 0.01)
    client, sequence, replica = asked(temperature, Method.COUPLED)
    assert await client.growth(sequence, DEADLINE_S) is None
    assert not client.advance(sequence, Budget(4, 4)), "it is not asked again at once"
    assert len(replica.lanes) == 1


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_a_late_chain_is_waited_for_as_long_as_growths_may_take(monkeypatch, method):
    """However soon a round would be done with it: dropping what is late would bias the output."""
    monkeypatch.setattr(draft_client, "_PATIENCE_S", 0.01)
    client, sequence, replica = asked(1.0, method)
    replica.load.slowest_growth_s = 60.0
    waiting = asyncio.create_task(client.growth(sequence, 0.001))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    late = Growth(0, 2, (), TokenTree.chain([5]), GrowthEnd.BUDGET)
    replica.lanes[0].put(late)
    assert await waiting is late


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_a_draft_that_never_answers_is_given_up_once_and_for_the_whole_request(monkeypatch, method):
    monkeypatch.setattr(draft_client, "_PATIENCE_S", 0.01)
    client, sequence, replica = asked(1.0, method)
    async with asyncio.timeout(PATIENCE_S):
        assert await client.growth(sequence, DEADLINE_S) is None
    replica.lanes[0].put(Growth(0, 2, (), TokenTree.chain([5]), GrowthEnd.BUDGET))
    for token_id in range(3):
        commit(sequence, token_id)
        assert not client.advance(sequence, Budget(4, 4))
        assert await client.growth(sequence, DEADLINE_S) is None
    assert len(replica.lanes) == 1, "and no other draft is asked"
    assert len(replica.load.growths) == 1, "the next request waits longer"


async def test_an_answer_is_remembered_and_no_patience_is_longer_than_a_bound(monkeypatch):
    monkeypatch.setattr(draft_client, "_LONGEST_PATIENCE_S", 0.02)
    client, sequence, replica = asked(1.0, Method.TOKEN)
    replica.lanes[0].put(Growth(0, 2, (), TokenTree.chain([5]), GrowthEnd.BUDGET))
    async with asyncio.timeout(PATIENCE_S):
        assert await client.growth(sequence, DEADLINE_S) is not None
        assert len(replica.load.growths) == 1
        replica.load.slowest_growth_s = 1000.0
        commit(sequence, 5)
        client.advance(sequence, Budget(1, 1))
        assert await client.growth(sequence, DEADLINE_S) is None


async def test_a_round_that_has_waited_long_waits_only_for_what_is_left_of_its_deadline():
    """A draft that sends a little now and then must not make it wait anew."""
    client, sequence, _ = asked()
    async with asyncio.timeout(DEADLINE_S):
        assert await client.growth(sequence, 60.0, waited_s=60.0) is None


async def test_how_long_growths_take_is_remembered_by_replica():
    load = LoadScore()
    for seconds in (0.1, 2.0, *[0.1] * 10):
        load.observe_growth(seconds)
    assert 1.7 < load.slowest_growth_s < 2.0
    for _ in range(1000):
        load.observe_growth(0.1)
    assert load.slowest_growth_s == 0.1


@pytest.mark.parametrize(
    ("capabilities", "context_length", "told"), [((AHEAD,), 7, [[2, 3, 1]]), ((), 7, []), ((AHEAD,), 6, [[]])]
)
async def test_a_draft_hears_of_a_proposal_as_far_as_it_may(capabilities, context_length, told):
    """It would refuse what is beyond its context, and has no use for it where it cannot grow ahead."""
    pool = FakePool()
    pool.replica.info = ModelInfo("d", "", 9, "", context_length, capabilities=capabilities)
    client = DraftClient(pool)
    sequence = new_sequence((1, 2, 3, 1), 20)
    client.advance(sequence, Budget(2, 2))
    before = len(pool.replica.link.sent)
    assert client.advance(sequence, Budget(0, 6, 20), TokenTree.chain([2, 3, 1])), "it is there"
    assert [list(entry.in_flight.token_ids) for entry in pool.replica.link.sent[before:]] == told


async def test_what_is_there_from_before_is_no_part_of_what_a_growth_took():
    client, sequence, replica = asked()
    answer(client, replica, sequence)
    await client.growth(sequence, DEADLINE_S)
    commit(sequence, 5)
    for num_there, told in ((2, 1), (3, None)):
        client.take_answer()
        client.advance(sequence, Budget(3, 3), num_there=num_there)
        answer(client, replica, sequence)
        await client.growth(sequence, DEADLINE_S)
        answered = client.take_answer()
        assert (answered and answered[0]) == told


async def test_what_an_open_let_grow_and_was_not_heard_of_may_be_there_and_so_the_next_growth_tells_nothing():
    client, sequence, replica = asked()
    commit(sequence, 5)
    for told in (None, 3):
        client.advance(sequence, Budget(3, 3))
        answer(client, replica, sequence)
        await client.growth(sequence, DEADLINE_S)
        answered = client.take_answer()
        assert (answered and answered[0]) == told
