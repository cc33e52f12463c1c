"""Changes of the logits that depend on the text: penalties, bias, minimum length, grammar. Does not draw tokens.

The order is bias, repetition, frequency and presence penalties, then minimum length, allowed tokens, bad words and
grammar, which forbid tokens (-inf). Temperature and filters come after (`distributions`). Let n(v) be the number of
occurrences of token v in the output (prompt excluded) and l(v) its logit plus bias:

    repetition   l(v) / r where l(v) > 0, else l(v) * r, if v occurs in prompt or output (Keskar et al., 1909.05858)
    frequency    l(v) - f * n(v)
    presence     l(v) - p if n(v) > 0

At a node of a token tree the output includes the path to it. Committed tokens are counted once. The counts of a node
are those of its parent plus one token, so nothing has to be undone when a tree is dropped. Only the entries of tokens
that occur are read and written, not whole rows. The counts at the root go to the device once for all rows of a
sequence; each row adds only the counts that its path changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.core.device import indices, sent
from specdec.core.errors import InvalidArgument, SpecdecError
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree
from specdec.sampling.grammar import GRAMMAR_FIELD

_ENTRIES_AT_ONCE = 1 << 18
"""Chunk limit: rows times penalized tokens computed in one call, 2 MiB in float64."""


class Mask(Protocol):
    """The state of a grammar at one position of a text."""

    def advance(self, token_id: int) -> bool:
        """Append a token. Returns False, without a change, if the token is forbidden here."""

    def copy(self) -> Mask:
        """The same state, for another continuation."""

    def allowed(self) -> bytes | None:
        """A bit for each token, the lowest of a byte first; as many bytes as there are, the other tokens are forbidden.
        None: every token is allowed."""

    @property
    def problem(self) -> SpecdecError | None:
        """Why no token is allowed any more."""

    @property
    def call_s(self) -> float:
        """Processor time of ``advance`` or ``allowed``, on average."""


class Transforms:
    """The logits processors of one sequence, in the state after its committed tokens."""

    def __init__(self, spec: SequenceSpec, mask: Mask | None = None) -> None:
        """Raises InvalidArgument if the output so far does not follow the grammar."""
        self.params = spec.sampling
        self.active = mask is not None or spec.sampling.changes_logits
        self._num_prompt_tokens = spec.num_prompt_tokens
        self._num_taken = 0
        self._counts = TokenCounts()
        self._bad_words = BadWords(spec.sampling.bad_words)
        self._mask = mask
        self.take_in(spec.token_ids)

    def take_in(self, ids: Sequence[int]) -> None:
        """Count the new ones of ``ids``, which are all committed ids. Raises InvalidArgument as above."""
        if not self.active or len(ids) == self._num_taken:
            return
        prompt = ids[self._num_taken : self._num_prompt_tokens]
        output = ids[max(self._num_taken, self._num_prompt_tokens) :]
        self._num_taken = len(ids)
        if self.params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(prompt):
                self._counts.add(token_id, 0)
        if self.params.penalizes:
            for token_id, count in Counter(output).items():
                self._counts.add(token_id, count)
        self._bad_words.take_in(output)
        if self._mask is not None and not all(map(self._mask.advance, output)):
            problem = InvalidArgument([(GRAMMAR_FIELD, "the output so far does not follow it")])
            raise self._mask.problem or problem

    @property
    def problem(self) -> SpecdecError | None:
        """Why the grammar allows no token any more."""
        return self._mask.problem if self._mask is not None else None

    @property
    def row_s(self) -> float:
        """Processor time that the grammar takes for a row, about: the row's token and its mask."""
        return 2 * self._mask.call_s if self._mask is not None else 0.0

    def collect(self, edits: _Edits, first_row: int, num_rows: int, tree: TokenTree) -> None:
        """Add the edits of ``num_rows`` rows to ``edits``: those of the last ``num_rows`` of root and tree nodes."""
        params, rows = self.params, np.arange(first_row, first_row + num_rows)
        if params.logit_bias:
            biased, bias = (np.array(column) for column in zip(*params.logit_bias, strict=True))
            edits.bias.append(_crossed(rows, biased, bias))
        if params.penalizes:
            strengths = np.array([params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
            edits.penalties.append((range(first_row, first_row + num_rows), *self._counts.counted(), strengths))
            along = zip(rows.tolist(), self._counts.along(tree)[-num_rows:], strict=True)
            entries = [(row, *entry) for row, counts in along for entry in counts.items()]
            columns = np.array(entries, np.int64).reshape(-1, 3).T
            edits.along.append((*columns, *(np.full(len(entries), strength) for strength in strengths)))
        num_missing = params.min_tokens - (self._num_taken - self._num_prompt_tokens)
        if num_missing > 0:
            depths = np.array([0, *(depth + 1 for depth in tree.depths)])[-num_rows:]
            edits.forbidden.append(_crossed(rows[depths < num_missing], np.array(params.end_token_ids, np.int64)))
        if params.allowed_token_ids:
            edits.allowed.append((range(first_row, first_row + num_rows), np.array(params.allowed_token_ids, np.int64)))
        if params.bad_words:
            possible = set(params.allowed_token_ids)
            if num_missing > 0:
                possible -= set(params.end_token_ids)
            for row, tokens in zip(rows.tolist(), self._bad_words.after(tree)[-num_rows:], strict=True):
                # Where no other token is left, the word is not kept out: some token has to be drawn.
                if tokens and not (possible and possible <= tokens):
                    edits.forbidden.append(_crossed(np.array([row]), np.array(sorted(tokens), np.int64)))

    def mask(self, rows: Tensor, tree: TokenTree) -> None:
        """Apply the grammar to rows [n, vocab], which belong to the last n of the root and the nodes of ``tree``.

        Each node has the state of its text, a copy of its parent's. After a forbidden node, or one beyond the limits of
        the grammar, no token is allowed.
        """
        if self._mask is None:
            return
        first = 1 + len(tree) - len(rows)  # index into root + nodes
        states: list[Mask | None] = [self._mask.copy()]
        for parent, token_id in tree.edges:
            above = states[1 + parent]
            state = above.copy() if above is not None else None
            states.append(state if state is not None and state.advance(token_id) else None)
        width = (rows.shape[-1] + 7) // 8
        masked = {
            row: bits.ljust(width, b"\0")[:width]
            for row, state in enumerate(states[first:])
            if (bits := state.allowed() if state is not None else b"") is not None
        }
        if masked:
            packed = torch.frombuffer(bytearray(b"".join(masked.values())), dtype=torch.uint8).view(-1, width, 1)
            one_each = sent(packed, rows.device) >> torch.arange(8, dtype=torch.uint8, device=rows.device) & 1
            which = indices(list(masked), rows.device)
            rows[which] = rows[which].masked_fill_(one_each.flatten(1)[:, : rows.shape[-1]] == 0, -torch.inf)


def transformed(logits: Sequence[Tensor], states: Sequence[tuple[Transforms, TokenTree]]) -> Tensor:  # [rows, vocab]
    """The processed logits of all sequences, concatenated.

    ``logits[i]`` [n, vocab] belong to the last n of the root and the nodes of the tree in ``states[i]``. They are not
    changed.
    """
    rows = logits[0] if len(logits) == 1 else torch.cat(list(logits))
    if not any(transforms.active for transforms, _ in states):
        return rows
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    edits, start = _Edits(), 0
    masked = []
    for sequence_logits, (transforms, tree) in zip(logits, states, strict=True):
        num_rows = len(sequence_logits)
        if transforms.active:
            transforms.collect(edits, start, num_rows, tree=tree)
            masked.append((transforms, rows[start : start + num_rows], tree))
        start += num_rows
    edits.apply(rows)
    for transforms, sequence_rows, tree in masked:
        transforms.mask(sequence_rows, tree)
    return rows


class _Edits:
    """Edits of a batch of rows: lists of (rows, token ids, numbers...) arrays, one item per sequence.

    ``penalties`` apply to all rows of a sequence: (range of rows, token ids, counts, strengths). ``along`` overrides
    them for single entries.
    """

    def __init__(self) -> None:
        self.bias: list[tuple[np.ndarray, ...]] = []
        self.penalties: list[tuple[range, np.ndarray, np.ndarray, np.ndarray]] = []
        self.along: list[tuple[np.ndarray, ...]] = []
        self.forbidden: list[tuple[np.ndarray, ...]] = []
        self.allowed: list[tuple[range, np.ndarray]] = []

    def apply(self, rows: Tensor) -> None:
        """Apply each kind of edit to rows [rows, vocab], for all sequences at once. No kind has an entry twice."""
        if self.bias:
            row, token_id, bias = _joined(self.bias, rows)
            rows[row, token_id] = (rows[row, token_id].double() + bias).to(rows.dtype)
        if self.penalties:
            row, token_id, *numbers = _joined(self.along, rows)
            along = _penalized(rows[row, token_id], *numbers)  # from the rows before `_penalize` changes them
            self._penalize(rows)
            rows[row, token_id] = along
        for span, token_ids in self.allowed:
            sequence_rows = rows[span.start : span.stop]
            allowed = sent(torch.from_numpy(token_ids), rows.device)
            kept = sequence_rows[:, allowed]
            sequence_rows.fill_(-torch.inf)
            sequence_rows[:, allowed] = kept
        if self.forbidden:
            row, token_id = _joined(self.forbidden, rows)
            rows[row, token_id] = -torch.inf

    def _penalize(self, rows: Tensor) -> None:
        ranges, *arrays = zip(*self.penalties, strict=True)
        token_ids, counts, strengths = _joined(list(zip(*arrays, strict=True)), rows)
        lengths = [len(array) for array in arrays[0]]
        splits = torch.split(token_ids, lengths), torch.split(counts, lengths)
        for span, token_id, count, strength in zip(ranges, *splits, strengths.view(-1, 3), strict=True):
            max_rows = max(1, _ENTRIES_AT_ONCE // max(1, len(token_id)))
            for chunk in torch.split(rows[span.start : span.stop], max_rows):  # [chunk, vocab] each
                chunk[:, token_id] = _penalized(chunk[:, token_id], count, *strength)


def _penalized(logits: Tensor, count: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Penalized logits of tokens that occur. All shapes broadcast. Strengths are tensors on the device, because a GPU
    divides by a Python number with other rounding than by a tensor."""
    wide = logits.double()
    wide = torch.where(wide > 0, wide / repetition, wide * repetition)
    return (wide - frequency * count - presence * (count > 0)).to(logits.dtype)


def _crossed(rows: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """The product of ``rows`` and the entries of ``columns``, which have equal lengths."""
    return (np.repeat(rows, len(columns[0])), *(np.tile(column, len(rows)) for column in columns))


def _joined(parts: Sequence[tuple[np.ndarray, ...]], like: Tensor) -> list[Any]:
    return [sent(torch.from_numpy(np.concatenate(arrays)), like.device) for arrays in zip(*parts, strict=True)]


class BadWords:
    """Sequences of tokens that must not occur in the output, and the last tokens of it that may begin one."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._alone = frozenset(word[0] for word in words if len(word) == 1)
        self._by_end: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._by_end.setdefault(word[-2], []).append(word)
        self._max_tail = max((len(word) - 1 for words in self._by_end.values() for word in words), default=0)
        self._tail: list[int] = []

    def take_in(self, output: Sequence[int]) -> None:
        """Append committed tokens of the output."""
        if self._max_tail:
            self._tail = [*self._tail, *output[-self._max_tail :]][-self._max_tail :]

    def after(self, tree: TokenTree) -> list[frozenset[int]]:
        """The tokens that would complete a word at the root and after each node."""
        paths = (tree.path_ids(node) for node in range(len(tree)))
        return [self._completing(self._tail), *(self._completing([*self._tail, *path]) for path in paths)]

    def _completing(self, text: list[int]) -> frozenset[int]:
        words = self._by_end.get(text[-1], ()) if text else ()
        completing = {word[-1] for word in words if text[-len(word) + 1 :] == list(word[:-1])}
        return self._alone | completing if completing else self._alone


class TokenCounts:
    """The tokens that occur, with their counts. Has committed tokens only, so nothing has to be undone."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(16, np.int64)  # by slot; longer than needed
        self._counts = np.zeros(16, np.int64)

    def add(self, token_id: int, count: int) -> None:
        """Add ``count`` to the count of ``token_id``; with 0 the token still occurs."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._counts):
                self._token_ids, self._counts = (
                    np.append(a, np.zeros_like(a)) for a in (self._token_ids, self._counts)
                )
            self._token_ids[slot] = token_id
        self._counts[slot] += count

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """The token_ids [n] that occur, each once, and their counts [n]. Valid until the next ``add``."""
        return self._token_ids[: len(self._slots)], self._counts[: len(self._slots)]

    def along(self, tree: TokenTree) -> list[dict[int, int]]:
        """Per root and node, the counts that differ from those at the root: the tokens of its path, including it."""
        counts: list[dict[int, int]] = [{}]
        for parent, token_id in tree.edges:
            above = counts[1 + parent]
            counts.append({**above, token_id: 1 + above.get(token_id, self._count(token_id))})
        return counts

    def _count(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])
