"""API keys and their quotas: bearer tokens from a file that may change at any time.

Knows keys and quotas; does not know requests. The file has the SHA-256 of each token, never the token. A slower hash is
not needed, as tokens are drawn at random from 2**256.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.core.errors import InvalidArgument, Overloaded, Unauthenticated
from specdec.security.watched_files import Changing

_SCHEME = "bearer "


class Key(BaseModel):
    """A line of the file: one JSON object, written by ``specdec key``. An absent quota means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    max_sequences: Annotated[int, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[int, Field(gt=0)] | None = None
    shared: bool = False
    """Whether its requests share cached prompts with those of other keys that say so."""
    operator: bool = False
    """Whether it may see the addresses of the replicas, and what is wrong with them."""


class Account:
    """The usage of a key: samples being generated now, and tokens, which are refilled evenly over a minute.

    Tokens are counted when they are generated, so a running request may overdraw; the next request then has to wait.
    """

    def __init__(self, key: Key | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._live = 0
        self._spent = 0.0  # tokens that are not refilled yet
        self._at = clock()

    @property
    def name(self) -> str:
        """Empty if no key is needed."""
        return self.key.name if self.key else ""

    @property
    def operator(self) -> bool:
        """Without keys every caller is the operator."""
        return self.key is None or self.key.operator

    @asynccontextmanager
    async def used_by(self, num_samples: int) -> AsyncIterator[None]:
        """Occupy ``num_samples``. Raises Overloaded if the quota is used up, InvalidArgument if it is too small."""
        max_samples = self.key.max_sequences if self.key else None
        if max_samples is not None and num_samples > max_samples:
            raise InvalidArgument([("n", f"this key may have {max_samples} samples at a time, not {num_samples}")])
        if max_samples is not None and self._live + num_samples > max_samples:
            raise Overloaded(f"the key {self.name} has {self._live} of its {max_samples} samples being generated")
        self._refill()
        per_minute = self.key.tokens_per_minute if self.key else None
        if per_minute is not None and self._spent >= per_minute:
            wait_s = (self._spent - per_minute + 1) * 60 / per_minute
            raise Overloaded(f"the key {self.name} has used its {per_minute} tokens per minute", wait_s)
        self._live += num_samples
        try:
            yield
        finally:
            self._live -= num_samples

    def salt(self, of_client: bytes) -> bytes:
        """The cache salt of a request, from the client's own: unless the key is ``shared``, another for each key.

        It begins with a byte that UTF-8 never has. So no client can name the salt of another key.
        """
        if self.key is None or self.key.shared:
            return of_client
        name = hashlib.sha256(self.key.name.encode()).digest()  # of one length, so that no two pairs are the same
        return b"\xff" + hashlib.sha256(name + of_client).digest()

    def spend(self, num_tokens: int) -> None:
        """Count tokens against the quota. Tokens spent without a quota do not count against a later one."""
        if self.key and self.key.tokens_per_minute:
            self._refill()
            self._spent += num_tokens

    def _refill(self) -> None:
        now = self._clock()
        rate = (self.key.tokens_per_minute or 0) / 60 if self.key else 0.0
        self._spent = max(0.0, self._spent - rate * (now - self._at))
        self._at = now


class ApiKeys:
    """The keys in ``file``, one per line; empty lines and # comments are skipped. Without a file no key is needed.

    The file is read again whenever it changes. An invalid version is logged, and the last valid one stays in use.
    Raises ValueError, which names every bad line, if the first version is invalid.
    """

    def __init__(self, file: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._anonymous = Account(None)
        self._accounts: dict[str, Account] = {}  # by name, so that a quota survives a change of the file
        self._keys = Changing([file], lambda: read_keys(file)) if file else None
        self._read = -1  # the file version of the accounts

    def account(self, authorization: str | None) -> Account:
        """The account for this ``authorization`` metadata. Raises Unauthenticated."""
        if self._keys is None:
            return self._anonymous
        self._open_accounts(self._keys)
        if not authorization or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("an API key is required, as metadata: authorization: Bearer KEY")
        digest = hashlib.sha256(authorization[len(_SCHEME) :].strip().encode()).hexdigest()
        match = None
        for account in self._accounts.values():
            # Compare all of them, each in constant time, so that the time of a refusal reveals nothing.
            if account.key is not None and hmac.compare_digest(account.key.sha256, digest):
                match = account
        if match is None:
            raise Unauthenticated("unknown API key")
        return match

    def _open_accounts(self, changing: Changing[list[Key]]) -> None:
        keys = changing.current()
        if self._read == changing.version:
            return
        self._read = changing.version
        accounts = {}
        for key in keys:
            accounts[key.name] = account = self._accounts.get(key.name) or Account(key, self._clock)
            account.key = key
        self._accounts = accounts


def read_keys(file: str) -> list[Key]:
    """Read the keys. Raises ValueError, which names every bad line and quotes none."""
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ValueError(f"api_keys_file {file}: {reason}") from None
    keys: list[Key] = []
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(Key.model_validate(json.loads(line)))
        except ValidationError as error:
            for problem in error.errors(include_input=False, include_url=False):
                location = problem["loc"]
                field = location[0] if location and location[0] in Key.model_fields else "a field"
                problems.append(f"line {number}: {field}: {problem['msg']}")
        except (ValueError, RecursionError):
            problems.append(f"line {number}: is no JSON object")
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            problems.append(f"two keys have the same {field}")
    if problems:
        raise ValueError(f"api_keys_file {file}: {'; '.join(problems)}")
    return keys
