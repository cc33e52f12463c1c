"""Which replica may have the beginning of a prompt in its cache: by name, and by memory. Bounded by load.

Prompts with the same first blocks name the same replicas in the same order (rendezvous hashing, by model and address).
So their keys and values are found again, whichever orchestrator they come through, and after its restart. A replica
that comes or goes moves only the prompts that name it first. What is too much for the first replica goes to the second
one of the same order. Longer prefixes are remembered with the replica that had them last: so the next turn of a
conversation finds the one before it, and conversations with one system prompt need not stay together. Orchestrators
share no memory, and those that have none of a prompt agree.

Thaler, Ravishankar: Using name-based mappings to increase hit rates (1998); Mirrokni, Thorup, Zadimoghaddam: Consistent
hashing with bounded loads (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

_MAX_OVER_MEAN = 1.25
"""A replica is passed over if one more sequence gave it more than so many times the mean."""

_MAX_REMEMBERED = 1 << 16
"""Prefixes, about 10 MB. A prompt of 1,000 ids has 28, one of 100,000 has 106."""


class Named(Protocol):
    """A replica as a prompt sees it."""

    address: str

    @property
    def model_digest(self) -> str: ...

    @property
    def num_live(self) -> int:
        """Its open sequences."""


_Named = TypeVar("_Named", bound=Named)


@dataclass(slots=True)
class PrefixCounts:
    """Of one replica, since its endpoint was found. ``hits``: opens of prompts that name it first, or that it had last;
    ``spills``: of other prompts. ``num_tokens``: ids of the opens that it answered; ``num_cached_tokens``: of these,
    what a target had in its cache."""

    hits: int = 0
    spills: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0


class Choice:
    """The choice of one pool. ``prefixes`` are those of a prompt (orchestrator.request.prefixes_of), at least one."""

    def __init__(self) -> None:
        self._last: dict[bytes, str] = {}  # by prefix, the address; the prefix that was used last is the last one

    def first_with_room(self, prefixes: Sequence[bytes], replicas: Sequence[_Named]) -> _Named:
        """The first replica in the order of a prompt that is not passed over. There must be one replica at least."""
        num_live = sum(replica.num_live for replica in replicas)
        limit = math.ceil(_MAX_OVER_MEAN * (1 + num_live) / len(replicas))
        return next(replica for replica in self.order(prefixes, replicas) if replica.num_live < limit)

    def order(self, prefixes: Sequence[bytes], replicas: Sequence[_Named]) -> list[_Named]:
        """The replica that had the longest remembered prefix last, then the others as the first prefix names them."""
        named, *longer = prefixes
        address = next((self._last[prefix] for prefix in reversed(longer) if prefix in self._last), "")

        def weight(replica: Named) -> tuple[bool, bytes]:
            name = f"{replica.model_digest} {replica.address}".encode()
            return replica.address != address, blake2b(name, digest_size=8, key=named).digest()

        return sorted(replicas, key=weight)

    def remember(self, prefixes: Sequence[bytes], replica: Named) -> None:
        """A prompt was opened at ``replica``."""
        for prefix in prefixes[1:]:
            self._last.pop(prefix, None)
            self._last[prefix] = replica.address
        while len(self._last) > _MAX_REMEMBERED:
            del self._last[next(iter(self._last))]
