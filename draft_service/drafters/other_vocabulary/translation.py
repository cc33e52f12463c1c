"""Two vocabularies as bytes: the tokens that they share, and a text of one in tokens of the other.

A text in the draft's tokens has settled ids, which no later text changes, and below them the latest ones, which are
encoded again whenever the text grows (Timor et al., 2502.05202).
"""

from __future__ import annotations

import codecs
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from specdec.sampling.token_bytes import TokenBytes

LOOK_BEHIND = 10
"""Tokens of a text that are encoded again with what follows, since a tokenizer joins what belongs together."""

_BYTES_BEFORE = 32
"""Of a text before the part that is encoded. They are encoded with it, so that it does not look like a beginning."""


class ByteVocabulary:
    """One of the two vocabularies."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer, self.vocab_size, self.end_token_ids = tokenizer, vocab_size, end_token_ids
        self._bytes = TokenBytes(tokenizer)
        self.first = tuple(tokenizer.encode("").ids)
        """What every text begins with, such as a begin token."""
        # Of tokens with equal bytes the last one: those that stand for single bytes come first.
        self.id_of = {name: token for token in range(vocab_size) if (name := self._bytes[token])}

    def renamed(self, other: ByteVocabulary) -> Mapping[int, bytes]:
        """End tokens that have no namesake in ``other``, and the name of the end token there."""
        if not other.end_token_ids:
            return {}
        end = other._bytes[other.end_token_ids[0]]
        return {token: end for token in self.end_token_ids if self._bytes[token] not in other.id_of}

    def text(self, ids: Iterable[int], renamed: Mapping[int, bytes] | None = None) -> bytes:
        names = renamed or {}
        return b"".join(names.get(token) or self._bytes[token] for token in ids)

    def tokens(self, text: bytes) -> list[int]:
        """What a text is encoded as; bytes that are no characters are left out."""
        ids = self._tokenizer.encode(text.decode("utf-8", "ignore"), add_special_tokens=False).ids
        return [token for token in ids if token < self.vocab_size]

    def tokens_after(self, before: bytes, text: bytes) -> list[int] | None:
        """The tokens of ``text`` where it follows ``before``; None: there are none with exactly these bytes."""
        for whole in (before + text, text, text.removeprefix(b" ")):  # some add a space to the beginning of a text
            ids = self.tokens(whole)
            first, length = len(ids), 0
            while first and length < len(text):
                first -= 1
                length += len(self._bytes[ids[first]])
            if self.text(ids[first:]) == text:
                return ids[first:]
        return None

    def spelled(self, part: bytes) -> list[int] | None:
        """Tokens of the first bytes of a character; None: the vocabulary lacks them."""
        if part in self.id_of:
            return [self.id_of[part]]
        ids = [self.id_of.get(bytes([byte]), -1) for byte in part]
        return None if -1 in ids else ids

    def num_known(self, text: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """How many of the first ids spell the beginning of ``text`` in whole characters, and its length."""
        known, length = (0, 0), 0
        for num, token in enumerate(ids, 1):
            name = self._bytes[token]
            if not text.startswith(name, length):
                break
            length += len(name)
            if text[length : length + 1] < b"\x80" or text[length : length + 1] >= b"\xc0":
                known = num, length
        return known


class Translation:
    """``target_of``: the target's token with the bytes of each of the draft's, -1 where there is none. ``share``: the
    part of the draft's vocabulary that the target has as well."""

    def __init__(self, draft: ByteVocabulary, target: ByteVocabulary) -> None:
        self.draft, self.target = draft, target
        self._target_ends, self._draft_ends = target.renamed(draft), draft.renamed(target)
        self.target_of = array("l", [-1]) * draft.vocab_size
        for name, token in {**draft.id_of, **{name: token for token, name in self._draft_ends.items()}}.items():
            self.target_of[token] = target.id_of.get(name, -1)
        self.share = sum(name in target.id_of for name in draft.id_of) / max(1, len(draft.id_of))

    def written(self, ids: Sequence[int]) -> bytes:
        """The text of the target's ids, for the draft."""
        return self.target.text(ids, self._target_ends)

    def by_text(self, ids: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for the text of ``drafted``, which are the draft's, behind its own ``ids``; of what is no
        text, such as half a character, those with the same bytes."""
        before, text = self.target.text(ids[-LOOK_BEHIND:]), self.draft.text(drafted, self._draft_ends)
        whole = before + text
        tokens = self.target.tokens_after(before, text[: max(0, len(text) - num_cut(whole))])
        return tokens or self.by_token(drafted)

    def by_token(self, drafted: Sequence[int]) -> list[int]:
        """The target's token for each of the draft's, up to the first that the target lacks."""
        return list(itertools.takewhile(lambda token: token >= 0, map(self.target_of.__getitem__, drafted)))


class DraftText:
    """A text of the target, in the draft's tokens. ``ids`` are settled; ``num_taken`` of the target's are in it."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.ids = array("I", translation.draft.first)
        self.num_taken = 0
        self._before, self._rest = b"", b""  # of what is settled, the end; what is not

    def take_in(self, ids: Sequence[int], max_tokens: int) -> None:
        """Take in the first ``max_tokens`` of those ``ids`` that are new."""
        new = ids[self.num_taken : self.num_taken + max_tokens]
        first = self._translation.target.first
        if not self.num_taken and tuple(new[: len(first)]) == first:
            self._rest += self._translation.written(new[len(first) :])
        else:
            self._rest += self._translation.written(new)
        self.num_taken += len(new)
        latest = self._encoded(self._rest)
        if latest and (len(latest) > 2 * LOOK_BEHIND or not self.ids):
            self._settle(latest)

    def latest(self, path: Sequence[int]) -> list[int] | None:
        """The tokens below ``ids``, with those of a ``path`` of the target's behind the text. None: it ends in part of
        a character, which the draft cannot take in."""
        rest = self._rest + self._translation.written(path)
        spelled = self._translation.draft.spelled(rest[len(rest) - num_cut(rest) :])
        return None if spelled is None else self._encoded(rest) + spelled

    def _encoded(self, rest: bytes) -> list[int]:
        draft, text = self._translation.draft, rest[: len(rest) - num_cut(rest)]
        exact = draft.tokens_after(self._before, text)
        return draft.tokens(text) if exact is None else exact

    def _settle(self, latest: Sequence[int]) -> None:
        draft = self._translation.draft
        num, length = draft.num_known(self._rest, latest[: max(1, len(latest) - LOOK_BEHIND)])
        if not num:
            if self.ids and len(latest) <= 4 * LOOK_BEHIND:
                return
            num, length = len(latest), len(self._rest) - num_cut(self._rest)  # a tokenizer that changes the text
        self.ids.extend(latest[:num])
        self._before = (self._before + self._rest[:length])[-_BYTES_BEFORE:]
        self._rest = self._rest[length:]


def num_cut(text: bytes) -> int:
    """Bytes at the end of a text that are only the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    return len(decoder.getstate()[0])
