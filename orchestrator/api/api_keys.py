"""Who may use the public API, and how much: bearer tokens from a file that may change at any time.

Knows keys and their quotas; refuses to know requests. The file has the SHA-256 of each token, never the token: what is
drawn at random from 2**256 needs no slower hash.
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
    """A line of the file: one JSON object. ``specdec key`` writes it. An absent quota is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    max_sequences: Annotated[int, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[int, Field(gt=0)] | None = None


class Account:
    """What a key has used: samples being generated now, and tokens, which come back evenly over a minute.

    Tokens are counted when they are there, so a request that began may overdraw; the next waits until that is made up.
    """

    def __init__(self, key: Key | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._live = 0
        self._spent = 0.0  # tokens that have not come back yet
        self._at = clock()

    @property
    def name(self) -> str:
        """Empty where nobody needs a key."""
        return self.key.name if self.key else ""

    @asynccontextmanager
    async def used_by(self, num_samples: int) -> AsyncIterator[None]:
        """Room for so many samples at a time. Raises Overloaded, or InvalidArgument if there never will be."""
        most = self.key.max_sequences if self.key else None
        if most is not None and num_samples > most:
            raise InvalidArgument([("n", f"this key may have {most} samples at a time, not {num_samples}")])
        if most is not None and self._live + num_samples > most:
            raise Overloaded(f"the key {self.name} has {self._live} of its {most} samples being generated")
        self._come_back()
        per_minute = self.key.tokens_per_minute if self.key else None
        if per_minute is not None and self._spent >= per_minute:
            wait_s = (self._spent - per_minute + 1) * 60 / per_minute
            raise Overloaded(f"the key {self.name} has used its {per_minute} tokens per minute", wait_s)
        self._live += num_samples
        try:
            yield
        finally:
            self._live -= num_samples

    def spend(self, num_tokens: int) -> None:
        """Without a quota nothing is owed, also when one comes later."""
        if self.key and self.key.tokens_per_minute:
            self._come_back()
            self._spent += num_tokens

    def _come_back(self) -> None:
        now = self._clock()
        rate = (self.key.tokens_per_minute or 0) / 60 if self.key else 0.0
        self._spent = max(0.0, self._spent - rate * (now - self._at))
        self._at = now


class ApiKeys:
    """``file`` has a key a line; empty lines and those that begin with # say nothing. Without a file all may come.

    Read again whenever it changed; one that is no good is logged, and the last good one stays in use. Raises
    ValueError, naming every bad line, if it is no good at first.
    """

    def __init__(self, file: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._anybody = Account(None)
        self._accounts: dict[str, Account] = {}  # by name, so that a quota survives a change of the file
        self._keys = Changing([file], lambda: read_keys(file)) if file else None
        self._read = -1  # the version that the accounts are of

    def account(self, authorization: str | None) -> Account:
        """Of whoever sent this ``authorization`` metadata. Raises Unauthenticated."""
        if self._keys is None:
            return self._anybody
        self._open_accounts(self._keys)
        if not authorization or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("an API key is required, as metadata: authorization: Bearer KEY")
        digest = hashlib.sha256(authorization[len(_SCHEME) :].strip().encode()).hexdigest()
        found = None
        for account in self._accounts.values():
            # All of them, each in constant time: how long a refusal takes tells nothing.
            if account.key is not None and hmac.compare_digest(account.key.sha256, digest):
                found = account
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

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
    """Raises ValueError, naming every bad line and quoting none."""
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text in UTF-8"
        raise ValueError(f"api_keys_file {file}: {reason}") from None
    keys: list[Key] = []
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(Key.model_validate(json.loads(line)))
        except ValidationError as error:
            for each in error.errors(include_input=False, include_url=False):
                field = each["loc"][0] if each["loc"] and each["loc"][0] in Key.model_fields else "a field"
                problems.append(f"line {number}: {field}: {each['msg']}")
        except ValueError:
            problems.append(f"line {number}: is no JSON object")
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            problems.append(f"two keys have the same {field}")
    if problems:
        raise ValueError(f"api_keys_file {file}: {'; '.join(problems)}")
    return keys
