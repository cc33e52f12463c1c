"""Certificates and CAs are replaced under load, and nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.security import dev_ca as certificates
from target_service.language_model import LmVerifier
from testing.certificates import caller, files, stranger
from testing.raw import started
from tests.cluster import cluster
from tests.contract.bad import runner
from tests.contract.over_tls import PATIENCE_S, REQUEST, target, verify


async def test_rotation_under_load_loses_nothing(own: Path) -> None:
    """New certificates, then a new CA: streams go on, new connections take the new files, and no request fails."""
    drafters = [LanguageModelDrafter(runner(blend=(2, 0.3)))]
    async with cluster([LmVerifier(runner()), LmVerifier(runner())], drafters, own) as running:
        [expected] = await running.client.generate(**REQUEST)
        addresses = [replica.address for replica in running.orchestrator.targets.replicas]
        served = 0

        async def load() -> None:
            nonlocal served
            while not done:
                # A connection of its own each time: the client's side of a rotation.
                async with Client(f"127.0.0.1:{running.orchestrator.port}", tls=stranger(own)) as client:
                    [sample] = await client.generate(**REQUEST)
                assert sample.token_ids == expected.token_ids
                assert sample.finish.speculation.num_replays == 0
                served += 1

        async def some(count: int) -> None:
            enough = served + count
            async with asyncio.timeout(PATIENCE_S):
                while served < enough:
                    if failed := [each for each in workers if each.done()]:
                        await failed[0]
                    await asyncio.sleep(0.01)

        done = False
        workers = [asyncio.create_task(load()) for _ in range(4)]
        try:
            await some(4)
            certificates.make(own)
            await some(4)
            assert await verify(addresses[0], caller(own, "orchestrator")) == 3

            # Another CA: all trust both, then take a certificate of the new one, then forget the old one.
            old = (own / "ca" / certificates.CERT).read_bytes()
            spare = own / "spare"
            certificates.make(spare)
            new = (spare / "ca" / certificates.CERT).read_bytes()
            for contents, certs in ((old + new, False), (old + new, True), (new, True)):
                for owner in certificates.OWNERS:
                    (own / owner / certificates.CA).write_bytes(contents)
                    if certs:
                        for name in (certificates.CERT, certificates.KEY):
                            (own / owner / name).write_bytes((spare / owner / name).read_bytes())
                await some(4)
            assert await verify(addresses[1], caller(spare, "orchestrator")) == 3
        finally:
            done = True
            await asyncio.gather(*workers)
        assert all(replica.ready for replica in running.orchestrator.targets.replicas)
        await running.settled()


async def test_an_orchestrator_with_a_bad_certificate_gets_in_once_it_has_a_good_one(own: Path, theirs: Path) -> None:
    """A channel keeps the certificate that it was made with; waiting for a target it must not."""
    async with target(own) as server:
        mine = own / "orchestrator"
        for name in (certificates.CERT, certificates.KEY):
            (mine / name).write_bytes((theirs / "orchestrator" / name).read_bytes())
        async with started(
            OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{server.port}"], **files(own, "orchestrator")))
        ) as orchestrator:
            [replica] = orchestrator.targets.replicas
            async with asyncio.timeout(PATIENCE_S):
                while "it trusts another CA" not in replica.problem:
                    await asyncio.sleep(0.01)
                certificates.make(own)
                while not replica.ready:
                    await asyncio.sleep(0.01)
