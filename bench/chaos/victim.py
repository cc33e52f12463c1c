"""``python -m bench.chaos.victim ADDRESS COUNT``: a client with many endless streams, started to be killed."""

from __future__ import annotations

import asyncio
import random
import sys

from specdec.client import Client
from testing.traffic import Traffic, several


async def main(address: str, count: int) -> None:
    async with (
        Client(address) as client,
        Traffic(client, several(count, 20_000, random.Random(count))) as traffic,
    ):
        await traffic.finished(600.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
