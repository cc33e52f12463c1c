"""The vocabulary, which draft and target must share to exchange token ids."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from specdec.core.rounds import ModelInfo
from specdec.runner.files import refuse_pointer

_MAX_PARTS = 8


@dataclass(frozen=True)
class Vocabulary:
    """The token of each id; empty where there is none."""

    tokens: tuple[bytes, ...]
    _parts: dict[int, Vocabulary] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(tokenizer: Tokenizer) -> Vocabulary:
        by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
        tokens = (by_id.get(index, "").encode("utf-8", "surrogatepass") for index in range(max(by_id, default=-1) + 1))
        return Vocabulary(tuple(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def below(self, size: int) -> Vocabulary:
        """The first ``size`` ids: those that a model with so many rows can draw. The same object for the same size,
        which knows its fingerprint then."""
        if size >= len(self.tokens):
            return self
        if size not in self._parts:
            if len(self._parts) >= _MAX_PARTS:  # peers choose the sizes
                self._parts.clear()
            self._parts[size] = Vocabulary(self.tokens[:size])
        return self._parts[size]

    def difference(self, others: Sequence[bytes]) -> str | None:
        """The first id with another token in ``others``, in words. None: there is none, or ``others`` are not known."""
        pairs = enumerate(itertools.zip_longest(others, self.tokens, fillvalue=b"")) if others else ()
        for index, (other, expected) in pairs:
            if other != expected:
                return f"id {index} is {_shown(other)}, not {_shown(expected)}"
        return None

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the (id, token) pairs; empty if there are none. Takes 0.1 s for a large vocabulary."""
        if not self.tokens:
            return ""
        pairs = (b"%d\0%s\0" % (index, token) for index, token in enumerate(self.tokens) if token)
        return hashlib.sha256(b"".join(pairs)).hexdigest()


def mismatch(draft: ModelInfo, target: ModelInfo, tokens: Vocabulary | None) -> str | None:
    """Why a draft cannot draw for a target, in words; None: it can. ``tokens``: the target's, if they are known.

    They need the same token at each id that both can draw. The draft may lack some ids: it refuses texts with these.
    """
    if (draft.vocab_size, draft.tokenizer_fingerprint) == (target.vocab_size, target.tokenizer_fingerprint):
        return None
    shared = min(draft.vocab_size, target.vocab_size)
    if tokens and draft.tokenizer_fingerprint == tokens.below(draft.vocab_size).fingerprint:
        if shared == draft.vocab_size:
            return None
        token = _shown(next(iter(tokens.tokens[shared:]), b""))
        return f"can draw {draft.vocab_size} ids, the target only {shared}: id {shared} is {token}"
    if tokens and (difference := tokens.below(shared).difference(draft.tokens[:shared])):
        return f"has another vocabulary than the target: {difference}"
    one, other = (info.tokenizer_fingerprint[:12] or "without a name" for info in (draft, target))
    return f"has the vocabulary {one} of {draft.vocab_size} tokens, the target {other} of {target.vocab_size}"


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace")) if token else "no token"


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
