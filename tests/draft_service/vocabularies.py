"""Vocabularies other than the bundled one, and what is between them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from draft_service.drafters.other_vocabulary.translation import ByteVocabulary, Translation
from specdec.runner.vocabulary import read_tokenizer
from tests.checkout import DEMO

TARGET = DEMO / "target"
TEXTS = [
    "def f(x):\n    return x\n",
    "naïve café — 東京 🦙🦙",
    "\ttabs  and   spaces ",
    "<|endoftext|>a",
    "größe = 'ä'",
]


def permuted(seed: int = 5) -> list[int]:
    """The token of the bundled tokenizer that is at each id of `other_tokenizer`."""
    order = list(range(len(bundled().get_vocab())))
    random.Random(seed).shuffle(order)
    return order


def bundled() -> Tokenizer:
    return read_tokenizer(TARGET / "tokenizer.json")


def other_tokenizer(num_merges: int | None = None) -> Tokenizer:
    """The bundled one with other ids, and another name for the end. With fewer merges a text takes more tokens."""
    plain = bundled()
    place = {old: new for new, old in enumerate(permuted())}
    vocab = {token: place[old] for token, old in plain.get_vocab().items() if token != "<|endoftext|>"}
    vocab["</s>"] = place[0]
    merges = [tuple(pair) for pair in json.loads(plain.to_str())["model"]["merges"]]
    built = Tokenizer(models.BPE(vocab, merges[:num_merges]))
    built.pre_tokenizer, built.decoder = plain.pre_tokenizer, plain.decoder
    built.add_special_tokens([AddedToken("</s>", special=True)])
    return built


def pieces() -> Tokenizer:
    """As of Llama 2: words begin with a metaspace, a text with <s>, and what is missing falls back to bytes."""
    byte_tokens = {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    letters = "▁abcdefghijklmnopqrstuvwxyz()=:.\n"
    vocab = {"<unk>": 0, "<s>": 1, **byte_tokens, **{letter: 258 + place for place, letter in enumerate(letters)}}
    merges = [("r", "e"), ("▁", "x"), ("▁", "▁"), ("a", "b"), ("f", "(")]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens(["<s>"])
    return built


def lower_case() -> Tokenizer:
    """It changes texts, and knows few letters."""
    vocab = {char: place for place, char in enumerate("[abcdefghijklmnopqrstuvwxyz")}
    built = Tokenizer(models.BPE(vocab, [], unk_token="["))
    built.normalizer, built.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    return built


@functools.cache
def known(make: Callable[[], Tokenizer]) -> ByteVocabulary:
    tokenizer = make()
    end = tokenizer.token_to_id("</s>") or 0
    return ByteVocabulary(tokenizer, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, [end])


@functools.cache
def between(make: Callable[[], Tokenizer]) -> Translation:
    return Translation(known(make), known(bundled))
