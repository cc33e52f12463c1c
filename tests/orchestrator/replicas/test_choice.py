"""Which replica a prompt names: equal for all orchestrators, bounded by load, moved by as little as possible."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from orchestrator.replicas import choice as choice_
from orchestrator.replicas.choice import Choice
from orchestrator.request import prefixes_of
from testing.patience import eventually
from testing.raw import orchestrator
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster, connected


@dataclass
class Fake:
    address: str
    model_digest: str = "d"
    num_live: int = 0


def _prefixes(ids: Iterable[int], salt: bytes = b"") -> tuple[bytes, ...]:
    return prefixes_of(array("I", ids), salt)


def _several(count: int) -> list[tuple[bytes, ...]]:
    return [_prefixes([index] * 16) for index in range(count)]


def named_by(prefixes: tuple[bytes, ...], replicas: list[Fake]) -> list[Fake]:
    return Choice().order(prefixes, replicas)


def test_a_prompt_shorter_than_a_block_names_no_replica():
    assert _prefixes([1] * 15) == ()
    assert len(_prefixes([1] * 16)) == 1


def test_a_growing_conversation_names_others_where_it_doubles_and_none_after_256_ids():
    first = [_prefixes(range(length))[0] for length in range(16, 2000)]
    assert len(set(first)) == 5  # of 16, 32, 64, 128 and 256 ids
    assert len(set(first[256 - 16 :])) == 1


def test_prompts_that_differ_behind_256_ids_name_the_same_replicas_and_others_do_not():
    system = list(range(256))
    assert _prefixes([*system, 1])[0] == _prefixes([*system, 2])[0]
    assert _prefixes([*system[:-1], 1000])[0] != _prefixes(system)[0]


def test_longer_prefixes_are_those_of_what_begins_alike_and_few():
    one, other = _prefixes(range(1000)), _prefixes([*range(700), *[9] * 300])
    shared = [prefix for prefix in one if prefix in other]
    assert one[: len(shared)] == other[: len(shared)] == tuple(shared)
    assert 0.9 * 700 / 16 < _num_blocks(len(shared)) <= 700 / 16
    assert one == _prefixes(range(1100))[: len(one)], "a longer prompt has those of a shorter one"
    assert len(one) == 29
    assert len(_prefixes(range(100_000))) == 107


def _num_blocks(num_prefixes: int) -> int:
    blocks = 16
    for _ in range(num_prefixes - 1):
        blocks += blocks // 16
    return blocks


def test_prefixes_are_those_of_one_salt():
    assert not {*_prefixes(range(900))} & {*_prefixes(range(900), b"a")}


def test_any_orchestrator_finds_the_same_order_whatever_order_it_knows_the_replicas_in():
    replicas = [Fake(str(number)) for number in range(5)]
    for prefix in _several(20):
        assert named_by(prefix, replicas) == named_by(prefix, replicas[::-1])


def test_all_replicas_are_named_first_about_equally_often():
    replicas = [Fake(str(number)) for number in range(4)]
    first = Counter(named_by(prefix, replicas)[0].address for prefix in _several(1000))
    assert all(200 < count < 300 for count in first.values())


def test_a_replica_that_goes_moves_only_the_prompts_that_named_it_first():
    replicas = [Fake(str(number)) for number in range(4)]
    for prefix in _several(100):
        before, after = named_by(prefix, replicas), named_by(prefix, replicas[1:])
        assert after == [replica for replica in before if replica is not replicas[0]]


def test_the_order_depends_on_the_model():
    replicas = [Fake(str(number)) for number in range(4)]
    others = [replace(replica, model_digest="e") for replica in replicas]
    orders = [[r.address for r in named_by(p, these)] for these in (replicas, others) for p in _several(10)]
    assert orders[:10] != orders[10:]


def test_the_first_replica_is_passed_over_only_above_a_quarter_more_than_the_mean():
    [prefixes] = _several(1)
    first, second, *others = named_by(prefixes, [Fake(str(number), num_live=16) for number in range(4)])
    first.num_live = 20
    assert Choice().first_with_room(prefixes, [first, second, *others]) is first  # 21 = 1.25 x (68 + 1) / 4
    first.num_live = 24
    assert Choice().first_with_room(prefixes, [first, second, *others]) is second
    first.num_live = second.num_live = 30
    assert Choice().first_with_room(prefixes, [first, second, *others]) is others[0]


@pytest.mark.parametrize("live", [[0], [5], [3, 3], [0, 0, 0], [100, 0, 0], [1, 1, 1, 1]])
def test_there_is_always_one_with_room(live):
    replicas = [Fake(str(number), num_live=count) for number, count in enumerate(live)]
    for prefix in _several(20):
        assert Choice().first_with_room(prefix, replicas) in replicas


def test_the_next_turn_goes_to_the_replica_of_the_last_one_while_that_has_room():
    choice, replicas = Choice(), [Fake(str(number)) for number in range(4)]
    system = list(range(512))
    turn, other = _prefixes([*system, *[1] * 64]), _prefixes([*system, *[2] * 64])
    named, *rest = choice.order(turn, replicas)
    assert choice.order(other, replicas) == [named, *rest]
    choice.remember(other, named)
    choice.remember(turn, rest[1])
    longer = _prefixes([*system, *[1] * 64, *[3] * 100])
    assert choice.order(longer, replicas) == [rest[1], named, rest[0], rest[2]]
    assert choice.order(other, replicas) == [named, *rest]
    assert choice.order(longer, [named, *rest[:1]]) == [named, rest[0]], "if it is gone the others are as they were"
    rest[1].num_live = 9
    assert choice.first_with_room(longer, replicas) is named


def test_what_was_not_used_for_longest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(choice_, "_MAX_REMEMBERED", 10)
    choice, replicas = Choice(), [Fake(str(number)) for number in range(4)]
    turns = [_prefixes([number] * 320) for number in range(4)]  # four each are remembered
    orders = [choice.order(turn, replicas) for turn in turns]
    for turn, order in zip(turns, orders, strict=True):
        choice.remember(turn, order[-1])
    firsts = [choice.order(turn, replicas)[0] for turn in turns]
    assert firsts == [orders[0][0], *(order[-1] for order in orders[1:])]


def _fields(ids: list[int], **others: object) -> dict[str, object]:
    return {"token_ids": {"token_ids": ids}, "temperature": 0.0, "max_tokens": 4, **others}


def _verifiers(count: int) -> list[TableVerifier]:
    return [TableVerifier(Table(), cached_blocks=1 << 12) for _ in range(count)]


async def test_a_conversation_finds_its_text_again_through_any_orchestrator_and_figures_say_so():
    verifiers = _verifiers(4)
    async with cluster(verifiers) as one:
        ids = list(range(300))
        [before] = await one.client.generate(**_fields(ids))
        assert before.finish.usage.cached_prompt_tokens == 0
        [after] = await one.client.generate(**_fields([*ids, *before.token_ids, *range(20)]))
        assert after.finish.usage.cached_prompt_tokens >= 288
        replicas = (await one.client.server_info()).replicas
        assert sorted(replica.prefix_hits for replica in replicas) == [0, 0, 0, 2]
        assert sum(replica.prefix_spills for replica in replicas) == 0
        assert sum(replica.opened_tokens for replica in replicas) == 300 + 324
        assert sum(replica.cached_tokens for replica in replicas) >= 288
        ports = [server.port for server in one.targets]
        async with orchestrator(ports) as (another, client):
            await connected(another)
            [again] = await client.generate(**_fields([*ids, 5]))
            assert again.finish.usage.cached_prompt_tokens >= 288


async def test_without_the_choice_nothing_is_counted():
    async with cluster(_verifiers(2), prefix_choice=False) as running:
        for _ in range(4):
            await running.client.generate(**_fields(list(range(300))))
        replicas = (await running.client.server_info()).replicas
        assert sum(replica.prefix_hits + replica.prefix_spills for replica in replicas) == 0
        assert sum(replica.opened_tokens for replica in replicas) == 1200


async def test_when_the_favourite_goes_the_next_one_takes_its_prompts_and_the_texts_stay():
    async with cluster(_verifiers(3)) as running:
        fields = _fields(list(range(64)), max_tokens=40)
        [expected] = await running.client.generate(**fields)
        replicas = running.orchestrator.targets.replicas
        [favourite] = [replica for replica in replicas if replica.prefixes.hits]
        favourite.eject("a test")
        await eventually(lambda: not favourite.ready)
        for _ in range(3):
            [sample] = await running.client.generate(**fields)
            assert sample.token_ids == expected.token_ids
        assert sorted(replica.prefixes.hits for replica in replicas) == [0, 1, 3]


async def test_a_drafts_choice_is_counted_too():
    async with cluster(_verifiers(1), [TableDrafter(Table()) for _ in range(3)]) as running:
        for length in (64, 80, 100):
            await running.client.generate(**_fields(list(range(length)), num_draft_tokens=3))
        assert sorted(draft.prefixes.hits for draft in running.orchestrator.drafts.replicas) == [0, 0, 3]
