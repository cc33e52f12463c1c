"""Row 24: certificates and tokens that are wrong, expired or missing. Knows which peers must be refused; does not know
other faults."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.chaos.lab import Lab, until
from bench.chaos.outcome import Outcome
from bench.chaos.traffic import Traffic, check_same, several
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.security import dev_ca as certificates
from specdec.security.tls import Tls

_VALID_S = 20.0


async def row_24(lab: Lab, seed: int, short: bool) -> Outcome:
    """Beside a good target there is one without TLS, one of another CA, a draft in a target's place, and one with a
    certificate that has expired since it started. Clients have a wrong token, no token, no TLS, and the right token."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        ours, theirs, old = (Path(name) / each for each in ("ours", "theirs", "old"))
        certificates.make(ours)
        certificates.make(theirs)
        shutil.copytree(ours / "ca", old / "ca")
        certificates.make(old, days=_VALID_S / 86400)
        expires = time.monotonic() + _VALID_S
        token = secrets.token_urlsafe(32)
        keys = Path(name) / "keys.jsonl"
        digest = hashlib.sha256(token.encode()).hexdigest()
        keys.write_text(json.dumps({"name": "lab", "sha256": digest, "operator": True}))
        async with AsyncExitStack() as stack:
            make = await stack.enter_async_context(lab.processes())
            targets = {
                "": make("bench.models.table_service target", *_flags(ours, "target")),
                "it does not speak TLS": make("bench.models.table_service target"),
                "not from a CA that tls_ca names": make("bench.models.table_service target", *_flags(theirs, "target")),
                "not issued for target": make("bench.models.table_service draft", *_flags(ours, "draft")),
                "has expired": make("bench.models.table_service target", *_flags(old, "target")),
            }
            orchestrator = make(
                "orchestrator",
                "--target=" + ",".join(each.address for each in targets.values()),
                f"--api-keys-file={keys}",
                *_flags(ours, "orchestrator"),
            )
            for each in targets.values():
                await each.start()
            await until(lambda: _later(expires), _VALID_S + 1)
            await orchestrator.start()
            tls = Tls(str(ours / "operator" / certificates.CA))
            client = await stack.enter_async_context(Client(orchestrator.address, tls=tls, api_key=token))

            async def told() -> bool:
                replicas = (await client.server_info()).replicas
                problems = {words: replica.problem for words, replica in zip(targets, replicas, strict=True)}
                return all(words in problem and bool(words) == bool(problem) for words, problem in problems.items())

            outcome.at_most("every bad target's problem reported after", await until(told, 30.0), 30.0)
            async with Traffic(client, several(4 if short else 32, 40, lab.chance)) as traffic:
                check_same(outcome, await traffic.finished(30.0), lab.reference)
            for what, wrong in (
                ("a wrong token", Client(orchestrator.address, tls=tls, api_key="wrong")),
                ("no token", Client(orchestrator.address, tls=tls)),
                ("no TLS", Client(orchestrator.address, api_key=token)),
            ):
                async with wrong:
                    outcome.check(*await _refused(wrong, what))
            logs = "".join(each.log_tail(10**6) for each in (*targets.values(), orchestrator))
            outcome.check("PRIVATE KEY" not in logs and token not in logs, "neither keys nor tokens were logged")
    return outcome


def _flags(directory: Path, owner: str) -> list[str]:
    files = (("cert", certificates.CERT), ("key", certificates.KEY), ("ca", certificates.CA))
    return [f"--tls-{what}={directory / owner / file}" for what, file in files]


async def _later(moment: float) -> bool:
    return time.monotonic() > moment


async def _refused(client: Client, what: str) -> tuple[bool, str]:
    try:
        await client.server_info()
    except SpecdecError as error:
        expected = "REPLICA_LOST" if what == "no TLS" else "UNAUTHENTICATED"
        return error.reason == expected, f"{what}: {error.reason}"
    return False, f"{what}: accepted"
