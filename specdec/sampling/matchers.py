"""Compiled grammars of one tokenizer, by llguidance. Imports no torch, and is called from any thread.

Knows grammars in llguidance's form; does not know what becomes of what they allow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from specdec.core.errors import InvalidArgument

_KEPT = 64
"""Compiled grammars that are kept for later outputs."""


class Matchers:
    """The tokenizer is read at once: some hundred milliseconds for large vocabularies."""

    def __init__(self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """``tokenizer``: a tokenizer.json, its path or its text. A complete output ends with an end token."""
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_token_ids))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def knows(self, grammar: str) -> bool:
        """Whether ``matcher`` takes no time."""
        return grammar in self._compiled

    def matcher(self, grammar: str) -> LLMatcher:
        """One of its own, at the beginning of an output. A new grammar of 32 KB takes some ten milliseconds. Raises
        InvalidArgument for a bad one."""
        with self._lock:
            if grammar not in self._compiled:
                made = LLMatcher(self._tokenizer, grammar, log_level=0)
                if made.is_error():
                    raise InvalidArgument([("spec.sampling.grammar", made.get_error().splitlines()[0])])
                self._compiled[grammar] = made
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()
