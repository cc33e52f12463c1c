"""Who may use the public API: tokens, a file that changes, and salts of cached prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.api.api_keys import Account, ApiKeys, Key, read_keys
from specdec.core.errors import Unauthenticated
from specdec.transport.wire import MAX_SALT_BYTES
from tests.orchestrator.api.conftest import line, write

# --- the file -----------------------------------------------------------------------------------------------


def test_a_token_is_known_by_its_hash(keys: Path) -> None:
    known = ApiKeys(str(keys))
    assert known.account("Bearer a-token").name == "alice"
    assert known.account("bearer  a-token ").name == "alice"
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer b-token", "Basic a-token", "a-token", "Bearer A-TOKEN"):
        with pytest.raises(Unauthenticated):
            known.account(wrong)
    digest = read_keys(str(keys))[0].sha256
    with pytest.raises(Unauthenticated):
        known.account(f"Bearer {digest}")


def test_without_a_file_everybody_may_come() -> None:
    account = ApiKeys().account(None)
    assert account.name == ""
    account.spend(10**9)


def test_a_change_of_the_file_is_taken_over_and_a_bad_one_is_not(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = ApiKeys(str(keys))
    known.account("Bearer a-token").spend(1000)
    write(keys, line("alice", "a2-token", tokens_per_minute=60), line("bob", "b-token"))
    assert known.account("Bearer b-token").name == "bob"
    with pytest.raises(Unauthenticated):
        known.account("Bearer a-token")
    assert known.account("Bearer a2-token")._spent > 900, "a new token is no new quota"
    for bad in ("{", line("bob", "b-token") * 2):
        write(keys, bad)
        assert known.account("Bearer b-token").name == "bob"
    keys.unlink()
    assert known.account("Bearer b-token").name == "bob"
    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert len(reasons) == 3
    write(keys, line("carol", "c-token"))
    assert known.account("Bearer c-token").name == "carol"
    with pytest.raises(Unauthenticated):
        known.account("Bearer b-token")


def test_every_bad_line_is_named_and_none_is_quoted(tmp_path: Path) -> None:
    secret = "sk-specdec-in-the-wrong-place"
    file = tmp_path / "keys.jsonl"
    bad = [
        "{",
        "[]",
        json.dumps({"name": "a", "sha256": secret}),
        json.dumps({"name": "", "sha256": "0" * 64, "max_sequences": 0}),
        json.dumps({"name": "b", "sha256": "1" * 64, secret: 1}),
        line("c", "x", tokens_per_minute=-1),
        line("d", "same"),
        line("e", "same"),
        line("e", "other"),
        "[" * 100_000,
    ]
    file.write_text("\n".join(each.strip() for each in bad))
    with pytest.raises(ValueError, match="api_keys_file") as refused:
        read_keys(str(file))
    said = str(refused.value)
    for number, field in (
        (1, "is no JSON object"),
        (10, "is no JSON object"),
        (2, "a field"),
        (3, "sha256"),
        (4, "name"),
        (4, "max_sequences"),
    ):
        assert f"line {number}: {field}" in said
    for words in ("line 5: a field: Extra", "line 6: tokens_per_minute", "the same name", "the same sha256"):
        assert words in said
    assert secret not in said
    with pytest.raises(ValueError, match="No such file"):
        read_keys(str(tmp_path / "nothing"))


# --- cached prompts -----------------------------------------------------------------------------------------


def account(name: str, shared: bool = False) -> Account:
    return Account(Key(name=name, sha256="0" * 64, shared=shared))


def test_two_keys_never_have_the_same_salt_unless_both_are_shared() -> None:
    salts = [b"", b"a", b"alice", b"x" * 256]
    one, two = account("alice"), account("bob")
    assert len({each.salt(salt) for each in (one, two) for salt in salts}) == 8, "whatever the clients' own are"
    assert one.salt(b"a") == account("alice").salt(b"a"), "on every orchestrator, and after a restart"
    assert account("carol", shared=True).salt(b"a") == account("dave", shared=True).salt(b"a") == b"a"
    assert Account(None).salt(b"a") == b"a"
    for salt in salts:
        assert len(one.salt(salt)) <= MAX_SALT_BYTES
        with pytest.raises(UnicodeDecodeError):  # so that no client of a shared key can name it
            one.salt(salt).decode()
