"""The vocabulary, which draft and target must share to exchange token ids. Does not know text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specdec.runner.files import refuse_pointer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``size`` usable ids (0 .. size - 1) and a fingerprint of the (id, token) pairs."""

    size: int
    fingerprint: str

    @staticmethod
    def of(tokenizer: Tokenizer) -> Vocabulary:
        pairs = sorted((index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items())
        digest = hashlib.sha256()
        for index, token in pairs:
            digest.update(f"{index}\x00{token}\x00".encode("utf-8", "surrogatepass"))
        return Vocabulary(pairs[-1][0] + 1 if pairs else 0, digest.hexdigest())


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises ValueError if the file is not a valid one."""
    refuse_pointer(file)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{file} is no tokenizer.json that can be read: {error}") from error


def read_vocabulary(file: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises ValueError if the file is not a valid one."""
    return Vocabulary.of(read_tokenizer(file))
