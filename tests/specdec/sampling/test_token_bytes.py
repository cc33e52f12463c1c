"""The bytes of tokens: together they are the text, whatever way a vocabulary writes bytes."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specdec.runner.vocabulary import read_tokenizer
from specdec.sampling.token_bytes import TokenBytes, byte_of
from tests.checkout import DEMO

TEXTS = ["def f(x):\n    return x\n", "naïve café — 東京 🦙", "\ttabs  and   spaces ", "a\x00b\x7f"]


@pytest.fixture(scope="module")
def byte_level():
    return read_tokenizer(DEMO / "target" / "tokenizer.json")


def metaspace():
    """A vocabulary as of Llama 2: words begin with a metaspace, and what is not in it falls back to bytes."""
    byte_tokens = {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    letters = {letter: 257 + place for place, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, **byte_tokens, **letters}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def joined(tokenizer, text):
    of_id = TokenBytes(tokenizer)
    return b"".join(of_id[token_id] for token_id in tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_byte_level_tokens_are_the_text(byte_level, text):
    assert joined(byte_level, text) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_with_metaspaces_and_single_bytes_are_the_text(text):
    assert joined(metaspace(), text) == text.encode()


def test_pieces_of_words_have_a_space_before_a_word():
    tokenizer = Tokenizer(models.WordPiece({"un": 0, "##able": 1, "to": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    assert joined(tokenizer, "unable to") == b" unable to"


def test_a_special_token_is_its_name_and_no_token_is_empty(byte_level):
    byte_level.add_tokens([AddedToken("<tool>", special=False)])
    of_id = TokenBytes(byte_level)
    assert of_id[0] == b"<|endoftext|>"
    assert of_id[byte_level.token_to_id("<tool>")] == b"<tool>"
    assert of_id[1 << 20] == b""


def test_every_byte_has_its_character():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert len(byte_of()) == 256
    for byte in range(128):
        [(character, _)] = trained.pre_tokenizer.pre_tokenize_str(chr(byte))
        assert byte_of()[character] == byte
