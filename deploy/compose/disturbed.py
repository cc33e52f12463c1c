"""Repeats a request with a different failure in mid-stream each time, and checks that the text stays the same.

    python deploy/compose/disturbed.py HOST:PORT[,HOST:PORT] COMMAND ...

Knows a deployment's addresses and commands that cause failures; does not know the failures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.client import Client, Sample, SpecdecError

REQUEST: dict[str, Any] = {
    "text": "def main(",
    "n": 8,
    "max_tokens": 400,
    "min_tokens": 400,
    "temperature": 0.8,
    "seed": 7,
    "num_draft_tokens": 4,
}
"""Enough samples for every replica, and long enough to continue for seconds after the failure."""

LOSE_AFTER_TOKENS = 400
TIMEOUT_S = 600.0


class CheckError(Exception):
    """The check failed or was not possible."""


@dataclass(frozen=True, slots=True)
class Run:
    samples: list[Sample]
    duration_s: float
    longest_pause_s: float

    def __str__(self) -> str:
        num_tokens = sum(len(sample.token_ids) for sample in self.samples)
        stats = [sample.finish.speculation for sample in self.samples]
        return (
            f"{num_tokens} tokens in {self.duration_s:.1f} s, {sum(each.num_accepted_tokens for each in stats)} from "
            f"the draft, {sum(each.num_replays for each in stats)} replays, "
            f"longest pause {self.longest_pause_s:.2f} s"
        )


async def generate(addresses: Sequence[str], command: str | None = None) -> Run:
    """Run the request, and ``command`` in mid-stream. Raises CheckError if that fails or is late; SpecdecError."""
    samples = [Sample() for _ in range(REQUEST["n"])]
    loss: asyncio.Task[None] | None = None
    num_tokens, longest_pause_s = 0, 0.0
    started = last = time.monotonic()
    async with Client(*addresses) as client:
        async for response in client.stream(TIMEOUT_S, **REQUEST):
            now = time.monotonic()
            if num_tokens:
                longest_pause_s = max(longest_pause_s, now - last)
            last = now
            samples[response.chunk.index].add(response.chunk)
            num_tokens += len(response.chunk.token_ids)
            if command and loss is None and num_tokens >= LOSE_AFTER_TOKENS:
                loss = asyncio.create_task(lose(command))
    if loss is not None:
        in_time = loss.done()
        await loss
        if not in_time:
            raise CheckError(f"the text was complete before this command had ended: {command}")
    return Run(samples, time.monotonic() - started, longest_pause_s)


async def lose(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if await process.wait():
        raise CheckError(f"this command failed with status {process.returncode}: {command}")


async def check(addresses: Sequence[str], commands: Sequence[str]) -> None:
    undisturbed = await generate(addresses)
    print(f"  undisturbed: {undisturbed}", flush=True)
    for command in commands:
        disturbed = await generate(addresses, command)
        for index, (was, now) in enumerate(zip(undisturbed.samples, disturbed.samples, strict=True)):
            if (was.token_ids, was.text) != (now.token_ids, now.text):
                raise CheckError(f"sample {index} has another text after: {command}")
        print(f"  same text: {disturbed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("addresses", help="addresses of orchestrators, comma-separated; the first one is used first")
    parser.add_argument("commands", nargs="*", help="shell commands; each one runs in the middle of a request")
    arguments = parser.parse_args()
    try:
        asyncio.run(check(arguments.addresses.split(","), arguments.commands))
    except (CheckError, SpecdecError) as error:
        print(f"disturbed: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
