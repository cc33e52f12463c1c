"""How much a key may use: samples at a time, and tokens per minute."""

from __future__ import annotations

import pytest

from orchestrator.api.api_keys import Account, Key
from specdec.core.errors import InvalidArgument, Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_key_has_so_many_samples_at_a_time() -> None:
    account = Account(Key(name="a", sha256="0" * 64, max_sequences=3))
    async with account.used_by(2):
        async with account.used_by(1):
            with pytest.raises(Overloaded, match="3 of its 3"):
                async with account.used_by(1):
                    pass
        async with account.used_by(1):
            pass
    with pytest.raises(InvalidArgument, match="3 samples at a time, not 4"):
        async with account.used_by(4):
            pass


async def test_tokens_come_back_evenly_over_a_minute() -> None:
    clock = Clock()
    account = Account(Key(name="a", sha256="0" * 64, tokens_per_minute=60), clock)
    async with account.used_by(1):
        account.spend(59)
    async with account.used_by(1):  # one is left: it may begin, and overdraw
        account.spend(31)
    with pytest.raises(Overloaded, match="60 tokens per minute") as refused:
        async with account.used_by(1):
            pass
    assert refused.value.retry_after_s == pytest.approx(31)
    clock.now += 31
    async with account.used_by(1):
        pass
    clock.now += 3600
    account.spend(0)
    assert account._spent == 0, "what is not used is not saved up"


def test_a_quota_that_comes_later_is_not_owed_for_what_was_before() -> None:
    now = [0.0]
    account = Account(Key(name="a", sha256="0" * 64), lambda: now[0])
    for _ in range(100):
        now[0] += 1
        account.spend(50_000)
    account.key = Key(name="a", sha256="0" * 64, tokens_per_minute=1000)
    account.spend(0)
    assert account._spent == 0
