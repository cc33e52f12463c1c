"""Endpoints by name, a choice between them, and which are ejected. (Their connections: test_connections.py.)"""

import asyncio
import dataclasses
import socket
from types import SimpleNamespace

import pytest

from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Role
from specdec.core.errors import NoReplica, ReplicaLost
from specdec.core.rounds import TRANSFORMS, Load, ModelInfo
from specdec.core.settings import EngineSettings
from target_service.server import create_server
from testing.patience import eventually
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster


class FakeLink:
    def __init__(self, num_lanes: int = 0) -> None:
        self.num_lanes = num_lanes
        self.draining = self.lost = False
        self.load = Load(live_sequences=num_lanes)
        self.num_others = 0


def _role() -> Role:
    def never(*_: object) -> None:
        raise AssertionError("not called here")

    return Role("target", never, never, never)


def _pool(*replicas: Replica) -> Pool:
    pool = Pool(_role(), [])
    pool.replicas = list(replicas)
    return pool


def _replica(name: str, lanes: int = 0, latency_s: float | None = 0.01) -> Replica:
    replica = Replica(name, _role())
    replica.link, replica.load.latency_s = FakeLink(lanes), latency_s
    return replica


def test_the_less_busy_of_two_is_picked():
    busy, free = _replica("busy", lanes=9), _replica("free", lanes=1)
    assert {_pool(busy, free).pick() for _ in range(20)} == {free}


def test_the_faster_of_two_equally_busy_is_picked():
    slow, fast = _replica("slow", latency_s=0.1), _replica("fast", latency_s=0.01)
    assert {_pool(slow, fast).pick() for _ in range(20)} == {fast}


def test_of_many_all_are_picked_but_the_worst():
    many = [_replica(str(n), lanes=n) for n in range(6)]
    picked = {_pool(*many).pick() for _ in range(300)}
    assert picked == set(many[:-1])


def test_who_lacks_a_capability_is_never_picked_for_it():
    older, newer = _replica("older"), _replica("newer", lanes=50)
    older.info = ModelInfo("m", "d", 8, "", 64)
    newer.info = dataclasses.replace(older.info, capabilities=(TRANSFORMS,))
    pool, needs = _pool(older, newer), frozenset({TRANSFORMS})
    assert pool.pick() is older
    assert pool.pick(needs=needs) is newer
    assert pool.pick(avoid=newer, needs=needs) is newer
    assert _pool(older).pick(needs=needs) is None


def test_a_prefix_names_the_same_replica_until_that_is_busier_or_farther_away_than_others():
    replicas = [_replica(str(number), lanes=4) for number in range(4)]
    pool, prefixes = _pool(*replicas), (b"a prefix",)
    [first] = {pool.pick(prefixes=prefixes) for _ in range(20)}
    assert {pool.pick() for _ in range(200)} == set(replicas), "without a prefix all are picked"
    assert pool.pick(avoid=first, prefixes=prefixes) is not first
    first.link.num_lanes = 8
    [second] = {pool.pick(prefixes=prefixes) for _ in range(20)}
    assert second is not first
    first.link.num_lanes, first.load.latency_s = 4, 0.03
    assert first not in {pool.pick(prefixes=prefixes) for _ in range(20)}
    first.load.latency_s = 0.014
    assert {pool.pick(prefixes=prefixes) for _ in range(20)} == {first}


def test_sequences_of_other_orchestrators_count():
    one, other = _replica("one", lanes=2), _replica("other", lanes=2)
    pool = _pool(one, other)
    picked = pool.pick(prefixes=(b"a prefix",))
    picked.link.num_others = 9
    assert pool.pick(prefixes=(b"a prefix",)) is not picked


async def test_when_all_lack_a_capability_it_is_said():
    older = _replica("older")
    older.info, older.problem = ModelInfo("m", "d", 8, "", 64), ""
    with pytest.raises(NoReplica, match="older: knows less than this request needs"):
        await _pool(older).wait_for_one(0.0, needs=frozenset({TRANSFORMS}))


async def test_a_replica_that_serves_again_wakes_who_waits_and_meanwhile_says_why_not():
    async with cluster([TableVerifier(Table())]) as running:
        pool, [server] = running.orchestrator.targets, running.targets
        [replica] = pool.replicas
        server._server.set_serving(False)
        while replica.ready:
            await asyncio.sleep(0.01)
        with pytest.raises(NoReplica, match="it says that it is not serving"):
            await pool.wait_for_one(0.05)
        waiting = asyncio.create_task(pool.wait_for_one(20.0))
        await asyncio.sleep(0.05)
        server._server.set_serving()
        assert await asyncio.wait_for(waiting, 10.0) is replica


def test_whoever_gave_the_sequence_back_is_asked_last():
    one, other = _replica("one"), _replica("other", lanes=50)
    assert _pool(one, other).pick(avoid=one) is other
    assert _pool(one).pick(avoid=one) is one


async def test_nobody_there_is_said_of_each_by_name():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"

        async def refused(*_: object, **__: object) -> None:
            raise ReplicaLost("refused here")

        role = Role("target", lambda _: SimpleNamespace(GetModelInfo=refused), lambda *_: None, lambda *_: None)
        async with Pool(role, [address, "no-such-host.invalid:1"]) as pool:
            with pytest.raises(NoReplica) as caught:
                await pool.wait_for_one(0.3)
    assert address in str(caught.value)
    assert "refused here" in str(caught.value)
    assert "no-such-host.invalid:1" in str(caught.value)
    assert caught.value.for_clients == "no target could be reached in 0.3 s"


async def test_a_name_brings_all_its_endpoints(monkeypatch):
    table = Table()
    async with cluster([TableVerifier(table), TableVerifier(table)]) as running:
        ports = [server.port for server in running.targets]

        async def getaddrinfo(host, port, **_):
            assert host == "targets"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in ports]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        role = running.orchestrator.targets.role
        async with Pool(role, ["targets:1"]) as pool:
            await eventually(lambda: sum(replica.ready for replica in pool.replicas) >= 2)
            assert {replica.address for replica in pool.replicas} == {f"127.0.0.1:{port}" for port in ports}


async def test_a_name_is_looked_up_again_and_again(monkeypatch):
    async with cluster([TableVerifier(Table())]) as running:
        first, second = running.targets[0].port, 1
        names = [first]

        async def getaddrinfo(host, port, **_):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in names]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        async with Pool(running.orchestrator.targets.role, ["targets:1"], resolve_every_s=0.01) as pool:
            names.append(second)
            await eventually(lambda: f"127.0.0.1:{second}" in {replica.address for replica in pool.replicas})
            names.remove(second)
            await eventually(lambda: f"127.0.0.1:{second}" not in {replica.address for replica in pool.replicas})
            assert f"127.0.0.1:{first}" in {replica.address for replica in pool.replicas}


async def test_a_name_service_that_is_down_takes_no_replica_with_it(monkeypatch):
    async with cluster([TableVerifier(Table())]) as running:

        async def down(*_, **__):
            raise OSError("no answer")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", down)
        pool = running.orchestrator.targets
        await pool._resolve()
        assert [replica.ready for replica in pool.replicas] == [True]
        assert "no answer" in next(iter(pool.unresolved.values()))


@pytest.mark.slow
async def test_a_replica_much_slower_than_the_fastest_is_ejected_and_its_sequences_move():
    table = Table()
    async with cluster(
        [TableVerifier(table, pass_s=0.002), TableVerifier(table, pass_s=0.2)], [TableDrafter(table)]
    ) as running:
        requests = [
            running.client.generate(token_ids={"token_ids": [1, seed]}, max_tokens=60, seed=seed) for seed in range(8)
        ]
        samples = await asyncio.gather(*requests)
        for seed, [sample] in enumerate(samples):
            [alone] = await running.client.generate(
                token_ids={"token_ids": [1, seed]}, max_tokens=60, seed=seed, num_draft_tokens=0
            )
            assert sample.token_ids == alone.token_ids
        slow = next(
            r for r in running.orchestrator.targets.replicas if r.address.endswith(str(running.targets[1].port))
        )
        assert not slow.ready
        assert "ms a round" in slow.problem


def _slow(*replicas: Replica) -> list[str]:
    return [replica.address for replica in _pool(*replicas)._slow({})]


def _answered(name: str, lanes: int, latency_s: float) -> Replica:
    replica = _replica(name, lanes, None)
    replica.observe_latency(latency_s)
    return replica


def test_a_replica_with_little_to_do_is_no_measure_of_one_that_is_busy():
    busy, idle = _answered("busy", 16, 0.15), _answered("idle", 1, 0.03)
    assert _slow(busy, idle) == []
    assert _slow(busy, _answered("as busy", 8, 0.03)) == ["busy"]
    assert _slow(_answered("slow", 1, 0.15), _answered("fast", 16, 0.03)) == ["slow"]


def test_what_was_compared_before_is_not_compared_again():
    slow, fast = _answered("slow", 4, 0.2), _answered("fast", 4, 0.01)
    pool = _pool(slow, fast)
    assert list(pool._slow({slow: 0, fast: 0})) == [slow]
    assert not pool._slow({slow: 1, fast: 0}), "it has answered nothing since"
    assert list(pool._slow({slow: 0, fast: 1})) == [slow], "how fast the other was is still known"


def test_a_text_goes_where_it_fits():
    small, large = _replica("small"), _replica("large", lanes=50)
    small.num_kv_slots, large.num_kv_slots = 100, 1000
    assert _pool(small, large).pick(num_tokens=99) is small
    assert _pool(small, large).pick(num_tokens=100) is large
    assert _pool(small, large).pick(avoid=large, num_tokens=100) is large
    assert _pool(small).pick(num_tokens=100) is small, "which says what is wrong"


def test_a_text_waits_for_the_larger_replica_while_that_is_away():
    small, large = _replica("small"), _replica("large")
    small.num_kv_slots, large.num_kv_slots, large.link = 100, 1000, None
    assert _pool(small, large).pick(num_tokens=99) is small
    assert _pool(small, large).pick(num_tokens=100) is None
    assert _pool(small, large).pick(num_tokens=1000) is small, "which says what is wrong"


async def test_how_much_fits_is_known_before_anything_is_sent():
    async with cluster([TableVerifier(Table(), num_slots=5000), TableVerifier(Table(), num_slots=200)]) as running:
        assert [replica.num_kv_slots for replica in running.orchestrator.targets.replicas] == [5000, 200]
        for seed in range(8):
            await running.client.generate(token_ids={"token_ids": list(range(300))}, max_tokens=5, seed=seed)


async def test_a_draft_is_compared_again_when_another_target_comes():
    request = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 60, "seed": 7}
    async with cluster([TableVerifier(Table(1000))], [TableDrafter(Table(1000))]) as running:
        await running.client.generate(**request)
        [target], [draft] = running.orchestrator.targets.replicas, running.orchestrator.drafts.replicas
        await running.targets[0].stop()
        while target.ready:
            await asyncio.sleep(0.01)
        assert draft.ready, "there is nobody to compare it with"
        other = create_server(TableVerifier(Table(500)), EngineSettings(port=running.targets[0].port))
        await other.start()
        try:
            while not target.ready:
                await asyncio.sleep(0.01)
            assert not draft.ready
            assert "the vocabulary table of 1000 tokens, the target table of 500" in draft.why_not
            await running.client.generate(**request)
        finally:
            await running.orchestrator.stop()
            await other.stop()


async def test_a_replica_whose_stream_has_ended_is_not_picked():
    lost = _replica("lost")
    lost.link.lost, lost.problem = True, ""
    assert _pool(lost).pick() is None
    with pytest.raises(NoReplica, match="lost: its stream has ended"):
        await _pool(lost).wait_for_one(0.0)
