"""The vocabulary, which draft and target must share to exchange token ids. Does not know text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specdec.runner.files import refuse_pointer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token of each id; empty where there is none."""

    tokens: tuple[bytes, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Vocabulary:
        by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
        tokens = (by_id.get(index, "").encode("utf-8", "surrogatepass") for index in range(max(by_id, default=-1) + 1))
        return Vocabulary(tuple(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def below(self, size: int) -> Vocabulary:
        """The first ``size`` ids: those that a model with so many rows can draw."""
        return Vocabulary(self.tokens[:size])

    @property
    def fingerprint(self) -> str:
        """A hash of the (id, token) pairs."""
        pairs = (b"%d\0%s\0" % (index, token) for index, token in enumerate(self.tokens) if token)
        return hashlib.sha256(b"".join(pairs)).hexdigest()


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises ValueError if the file is not a valid one.

    The file also keeps what its author last asked of the tokenizer: to cut or pad texts, and in training to split words
    at random. That is no property of the model, and is undone.
    """
    refuse_pointer(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{file} is no tokenizer.json that can be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def read_vocabulary(file: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises ValueError if the file is not a valid one."""
    return Vocabulary.of(read_tokenizer(file))
