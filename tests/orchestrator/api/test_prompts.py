"""Prompts become token ids beside the event loop; one that cannot fit, whatever its tokens are, is not tokenized."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from orchestrator.api.bounds import is_long
from orchestrator.api.prompts import Prompts, characters_per_token
from specdec.core.errors import ContextExceeded, InvalidArgument
from specdec.v1 import generation_pb2
from testing.patience import eventually
from testing.table_model import Table, TableVerifier
from tests import checkout
from tests.cluster import Cluster, cluster, live

TEXT = "def f(x):\n    return x + 1\n" * 400


def tokenizer(normalizer: Any = None, pre_tokenizer: Any = None, *added: AddedToken) -> Tokenizer:
    made = Tokenizer.from_file(str(checkout.TOKENIZER))
    made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])
    made.add_tokens(list(added))
    return made


def falling_back(fallback: bool) -> Tokenizer:
    """As Llama 2 has it: spaces are a character of their own, and what is unknown becomes bytes."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: number for number, token in enumerate(known)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


BOUNDED = {
    "bytes": tokenizer(),
    "NFC": tokenizer(normalizers.NFC()),
    "NFKC": tokenizer(normalizers.NFKC()),
    "NFD, lower case": tokenizer(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "replaced": tokenizer(normalizers.Replace("aaa", "b")),
    "digits": tokenizer(None, pre_tokenizers.Digits()),
    "split": tokenizer(None, pre_tokenizers.Split(Regex("a+"), "merged_with_previous")),
    "added": tokenizer(None, None, AddedToken("a long added token of a good many characters, more than any other has")),
    "bytes for the unknown": falling_back(True),
}
UNBOUNDED = {
    "spaces are cut off": tokenizer(normalizers.Strip()),
    "accents are removed": tokenizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "replaced by nothing": tokenizer(normalizers.Replace("a", "")),
    "replaced by a pattern": tokenizer(normalizers.Replace(Regex(" +"), " ")),
    "split and removed": tokenizer(None, pre_tokenizers.Split(" ", "removed")),
    "words": tokenizer(None, pre_tokenizers.Whitespace()),
    "spaces belong to a token": tokenizer(None, None, AddedToken("<mask>", lstrip=True)),
    "unknown ones are one": falling_back(False),
    "another model": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}
TEXTS = st.text(st.sampled_from("a bxyé\n\u00ad\u0301\u0323\u0308\u0345\u1f82\ufdfa\uac01\u2126\u1fef")) | st.text()


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_is_said_of_it_before(name: str, text: str) -> None:
    message = generation_pb2.GenerateRequest(text=text)
    prompts = Prompts(BOUNDED[name])
    assert prompts.fewest_ids(message) <= len(prompts.ids(message))
    long = generation_pb2.GenerateRequest(text="xy" * 10_000)
    assert prompts.fewest_ids(long) > 1, "and it is said of a long one"


@pytest.mark.parametrize("name", UNBOUNDED)
def test_of_a_tokenizer_that_may_lose_characters_nothing_is_said(name: str) -> None:
    assert characters_per_token(UNBOUNDED[name]) is None


def test_a_character_decomposes_into_no_more_than_is_taken_into_account() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    assert max(len(unicodedata.normalize("NFD", each)) for each in characters) == 4
    assert max(len(unicodedata.normalize("NFKD", each)) for each in characters) == 18


@given(st.text(min_size=1))
def test_ids_are_those_of_encode(text: str) -> None:
    expected = BOUNDED["bytes"].encode(text).ids
    assert list(Prompts(BOUNDED["bytes"]).ids(generation_pb2.GenerateRequest(text=text))) == expected


# --- over gRPC ----------------------------------------------------------------------------------------------


class Watched(Prompts):
    """Notes each text that is tokenized, and waits at a gate before the first."""

    def __init__(self) -> None:
        super().__init__(BOUNDED["bytes"])
        self.num_texts, self.gate = 0, threading.Event()

    def ids(self, message: generation_pb2.GenerateRequest) -> array[int]:
        if message.HasField("text"):
            self.num_texts += 1
            assert self.gate.wait(30)
        return super().ids(message)


OTHER: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "seed": 5}


@asynccontextmanager
async def deployment(context_length: int = 65536, **settings: Any) -> AsyncIterator[tuple[Cluster, Watched]]:
    table = Table(vocab_size=4096, context_length=context_length)
    async with cluster([TableVerifier(table, pass_s=0.001)], **settings) as running:
        servicer = running.orchestrator._servicer
        servicer._prompts = servicer._reader._prompts = prompts = Watched()
        yield running, prompts


async def waiting(running: Cluster, count: int) -> None:
    await eventually(lambda: running.orchestrator._servicer.waiting_requests == count)


async def test_a_text_is_tokenized_once_its_request_has_a_place() -> None:
    async with deployment(max_live_sequences=1) as (running, prompts):
        first = asyncio.create_task(running.client.generate(**OTHER))
        await live(running.orchestrator, 1)
        second = asyncio.create_task(running.client.generate(text=TEXT, max_tokens=2))
        await waiting(running, 1)
        assert not prompts.num_texts
        first.cancel()
        prompts.gate.set()
        await second
        assert prompts.num_texts == 1


async def test_a_text_that_cannot_fit_is_refused_before_it_waits_or_is_tokenized() -> None:
    async with deployment(context_length=200, max_live_sequences=1, max_waiting_requests=0) as (running, prompts):
        busy = asyncio.create_task(running.client.generate(**OTHER | {"max_tokens": 190}))
        await live(running.orchestrator, 1)
        for _ in range(3):
            with pytest.raises(ContextExceeded, match="at least 201 tokens"):
                await running.client.generate(text="a" * (200 * 53 + 1))
        assert not prompts.num_texts
        assert not busy.done()
        await busy


async def test_a_cancelled_request_keeps_its_place_while_its_text_is_tokenized() -> None:
    async with deployment(max_live_sequences=1) as (running, prompts):
        cancelled = asyncio.create_task(running.client.generate(text=TEXT, max_tokens=2))
        await eventually(lambda: prompts.num_texts)
        cancelled.cancel()
        next_ = asyncio.create_task(running.client.generate(text=TEXT, max_tokens=2))
        await waiting(running, 1)
        assert prompts.num_texts == 1
        prompts.gate.set()
        await next_
        await live(running.orchestrator, 0)


async def test_ids_outside_the_vocabulary_are_named_in_a_long_prompt_too() -> None:
    async with deployment() as (running, _):
        for ids in ([4096], [1] * 9999 + [4096]):
            assert is_long(generation_pb2.GenerateRequest(token_ids={"token_ids": ids})) is (len(ids) > 1)
            with pytest.raises(InvalidArgument, match="4096 is outside the vocabulary"):
                await running.client.generate(token_ids={"token_ids": ids}, max_tokens=2)
