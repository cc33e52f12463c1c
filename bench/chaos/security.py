"""Row 24: certificates and tokens that are wrong, expired or missing. Knows which peers must be refused; does not know
other faults."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.security import dev_ca as certificates
from testing.certificates import files, refused_targets, stranger
from testing.lab import until
from testing.trial import Trial

_VALID_S = 20.0


async def wrong_certificates(trial: Trial) -> None:
    """Beside a good target there is one without TLS, one of another CA, a draft in a target's place, and one with a
    certificate that has expired since it started. Clients have a wrong token, no token, no TLS, and the right token."""
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
            make = await stack.enter_async_context(trial.processes())
            problems = {"": (ours, "target"), **refused_targets(ours, theirs), "has expired": (old, "target")}
            targets = {
                words: make(f"testing.table_service {role}", *(_flags(directory, role) if directory else ()))
                for words, (directory, role) in problems.items()
            }
            orchestrator = make(
                "orchestrator",
                "--target=" + ",".join(target.address for target in targets.values()),
                f"--api-keys-file={keys}",
                *_flags(ours, "orchestrator"),
            )
            for target in targets.values():
                await target.start()
            await asyncio.sleep(expires - time.monotonic() + 0.1)
            await orchestrator.start()
            tls = stranger(ours)
            client = await stack.enter_async_context(Client(orchestrator.address, tls=tls, api_key=token))

            async def reported() -> bool:
                replicas = (await client.server_info()).replicas
                problems = {words: replica.problem for words, replica in zip(targets, replicas, strict=True)}
                return all(words in problem and bool(words) == bool(problem) for words, problem in problems.items())

            trial.at_most("every bad target's problem reported after", await until(reported, 30.0), 30.0)
            await trial.check_serves(client, 4 if trial.short else 32, 40)
            for what, wrong, reason in (
                ("a wrong token", Client(orchestrator.address, tls=tls, api_key="wrong"), "UNAUTHENTICATED"),
                ("no token", Client(orchestrator.address, tls=tls), "UNAUTHENTICATED"),
                ("no TLS", Client(orchestrator.address, api_key=token), "REPLICA_LOST"),
            ):
                async with wrong:
                    refusal = await _refusal(wrong)
                    trial.check(refusal == reason, f"{what}: {refusal}")
            logs = "".join(process.log_tail(10**6) for process in (*targets.values(), orchestrator))
            trial.check("PRIVATE KEY" not in logs and token not in logs, "neither keys nor tokens were logged")


def _flags(directory: Path, owner: str) -> list[str]:
    return [f"--{name.replace('_', '-')}={file}" for name, file in files(directory, owner).items()]


async def _refusal(client: Client) -> str:
    try:
        await client.server_info()
    except SpecdecError as error:
        return error.reason
    return "accepted"
