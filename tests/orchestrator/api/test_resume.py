"""A request goes on at another orchestrator, or after its client read nothing for long, with nothing lost."""

from array import array
from contextlib import AsyncExitStack, aclosing

import pytest

from specdec.client import Client, Sample
from specdec.core.errors import ModelMismatch
from specdec.v1 import common_pb2
from testing.patience import eventually
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster, read_narrowly
from tests.models import table_reader
from tests.orchestrator.api.test_request import read, refused

TABLE = Table(vocab_size=64)
REQUEST = dict(token_ids={"token_ids": [1, 2, 3]}, max_tokens=50, seed=11)


def _deployment(**settings):
    return cluster([TableVerifier(TABLE, pass_s=0.001)], [TableDrafter(TABLE)], **settings)


async def _rest(client, received, **request):
    """The sample with what came after ``received``; raises if positions do not follow."""
    sample = Sample(token_ids=list(received))
    async for response in client.stream(**request, resume={0: {"token_ids": received}}):
        if response.HasField("chunk"):
            sample.add(response.chunk)
    return sample


async def test_a_request_resumes_with_the_ids_received_so_far():
    async with _deployment() as running:
        [whole] = await running.client.generate(**REQUEST)
        for num_received in (0, 1, 17, 49, 50):
            rest = await _rest(running.client, whole.token_ids[:num_received], **REQUEST)
            assert rest.token_ids == whole.token_ids
            assert rest.finish.reason == whole.finish.reason
            assert rest.finish.usage.completion_tokens == 50
        await running.settled()


async def test_whole_samples_begin_with_what_was_received_before():
    async with _deployment() as running:
        first, second = await running.client.generate(**REQUEST, n=2)
        received = {1: {"token_ids": second.token_ids[:17]}}
        again, resumed = await running.client.generate(**REQUEST, n=2, resume=received)
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
        assert resumed.token_ids == second.token_ids
        assert resumed.text == second.text[second.text_ends[16] :]
        assert len(resumed.origins) == len(resumed.text_ends) == 50 - 17


async def test_a_stop_is_found_again_by_a_request_that_had_reached_it():
    async with _deployment() as running:
        [free] = await running.client.generate(**REQUEST)
        stop = free.token_ids[20]
        request = {**REQUEST, "stop_token_ids": [stop]}
        [stopped] = await running.client.generate(**request)
        [again] = await running.client.generate(**request, resume={})
        assert again.token_ids == stopped.token_ids
        rest = await _rest(running.client, stopped.token_ids, **request)
        assert rest.token_ids == stopped.token_ids
        assert rest.finish.stop_token_id == stop


async def test_our_client_survives_the_loss_of_an_orchestrator():
    async with _deployment() as one, _deployment() as other:
        expected = await one.client.generate(**REQUEST, n=3)
        async with Client(f"127.0.0.1:{one.orchestrator.port}", f"127.0.0.1:{other.orchestrator.port}") as client:
            samples = [Sample() for _ in range(3)]
            admissions = 0
            async with aclosing(client.stream(**REQUEST, n=3)) as responses:
                async for response in responses:
                    if response.HasField("admission"):
                        admissions += 1
                        continue
                    samples[response.chunk.index].add(response.chunk)
                    if sum(len(sample.token_ids) for sample in samples) > 40 and one.orchestrator.live_sequences:
                        await one.orchestrator.stop()
            assert admissions == 1
            assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
            assert all(sample.finished for sample in samples)
        await other.settled()


async def test_our_client_never_continues_with_another_model():
    """Half of the orchestrators may have another one, and nothing in the rest of the text would show it."""
    table = Table(vocab_size=65)
    async with _deployment() as one, cluster([TableVerifier(table)], [TableDrafter(table)]) as other:
        async with Client(f"127.0.0.1:{one.orchestrator.port}", f"127.0.0.1:{other.orchestrator.port}") as client:
            received = Sample()

            async def read() -> None:
                async for response in client.stream(**REQUEST):
                    if response.HasField("chunk"):
                        received.add(response.chunk)
                        if one.orchestrator.live_sequences:
                            await one.orchestrator.stop()

            with pytest.raises(ModelMismatch, match="table-target"):
                await read()
            assert received.token_ids
            assert not received.finished
        await other.settled()


async def test_without_a_seed_64_bits_are_drawn_and_returned_and_suffice_for_another_orchestrator():
    """Law 4: the whole text is that of the seed that was returned, though one orchestrator began and another ended."""
    verifiers = [TableVerifier(table_reader.TABLE, pass_s=0.001) for _ in range(2)]
    unseeded = dict(token_ids=REQUEST["token_ids"], max_tokens=50, n=2, temperature=1.0, stop_token_ids=[])
    async with cluster(verifiers[:1]) as one, cluster(verifiers[1:]) as other:
        admissions, samples = [], [Sample(), Sample()]
        async with (
            Client(*(f"127.0.0.1:{each.orchestrator.port}" for each in (one, other))) as client,
            aclosing(client.stream(**unseeded)) as responses,
        ):
            async for response in responses:
                if response.HasField("admission"):
                    admissions.append(response.admission)
                    continue
                samples[response.chunk.index].add(response.chunk)
                if one.orchestrator.live_sequences and sum(len(sample.token_ids) for sample in samples) > 20:
                    await one.orchestrator.stop()
        [admission] = admissions
        assert admission.model_digest == verifiers[0].info.model_digest
        fields = {**unseeded, "seed": admission.seed}
        expected = [table_reader.oracle(fields, index) for index in range(2)]
        assert [(sample.token_ids, sample.finish.reason) for sample in samples] == expected
        seeds = {admission.seed}
        for _ in range(8):
            async with aclosing(other.client.stream(**{**unseeded, "max_tokens": 1})) as responses:
                seeds |= {response.admission.seed async for response in responses if response.HasField("admission")}
        assert len(seeds) == 9
        assert max(seeds) >= 1 << 56, "64 bits, nine times: one in 2**72 has none of the first eight"


async def test_a_client_that_reads_nothing_holds_no_memory_and_then_gets_the_same(monkeypatch):
    async with _deployment(park_after_s=0.05) as running, AsyncExitStack() as stack:
        request = dict(token_ids={"token_ids": [1, 2, 3]}, max_tokens=800, seed=5)
        [expected] = await running.client.generate(**request)
        read_narrowly(monkeypatch)
        slow_client = await stack.enter_async_context(Client(f"127.0.0.1:{running.orchestrator.port}"))
        sample = Sample()
        async with aclosing(slow_client.stream(**request)) as responses:
            async for response in responses:
                if response.HasField("chunk"):
                    sample.add(response.chunk)
                    if len(sample.token_ids) < 20:  # read no further until nothing is left on the services
                        await eventually(
                            lambda: not any(s.load.live_sequences for s in (*running.targets, *running.drafts))
                        )
        assert sample.token_ids == expected.token_ids
        assert sample.finish.speculation.num_replays > 0
        await running.settled()


def test_an_output_is_resumed_where_tokens_that_a_client_lacks_are_drawn_as_before():
    """Under token and block verification they would be drawn with other noise, and which of them a client lacks
    depends on what they are: text is held back that may begin a stop string."""
    received = dict(resume={0: {"token_ids": [1, 2]}}, seed=5)
    for method in (common_pb2.VERIFICATION_METHOD_TOKEN, common_pb2.VERIFICATION_METHOD_BLOCK):
        assert refused(verification=method, **received).keys() == {"resume[0]"}
        assert refused(verification=method, temperature=0.5, **received).keys() == {"resume[0]"}
        assert read(verification=method, temperature=0.0, **received).resume == {0: array("I", [1, 2])}
        assert read(verification=method, resume={0: {}}, seed=5).resume == {0: array("I")}
    assert read(verification=common_pb2.VERIFICATION_METHOD_COUPLED, **received).resume == {0: array("I", [1, 2])}
