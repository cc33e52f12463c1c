"""A KV cache that reuses nothing, for contenders that get the same prompts one after the other.

A service would find in its cache what it was asked a moment ago, and transformers would not: here every sequence has a
salt of its own, as if each came from another tenant. Knows salts alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from specdec.kv_cache import SequenceCache
from specdec.model_runner import ModelRunner


def share_nothing(runner: ModelRunner) -> None:
    """From now on every cache of ``runner`` has a salt that no other has."""
    new_cache = runner.new_cache
    runner.new_cache = lambda salt=b"": new_cache(os.urandom(16))  # type: ignore[method-assign]


def share_nothing_unless(reuse: Callable[[], bool]) -> None:
    """The same for all runners of this process, where ``reuse`` is false at the time."""
    new_cache = ModelRunner.new_cache

    def salted(runner: ModelRunner, salt: bytes = b"") -> SequenceCache:
        return new_cache(runner, salt if reuse() else os.urandom(16))

    ModelRunner.new_cache = salted  # type: ignore[method-assign, assignment]
