"""Grammars at the beginning of an output, for the tokens that they force. Knows a tokenizer; does not know sequences.

Its calls take up to some hundred milliseconds, and come from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from specdec.core.rounds import ModelInfo

_KEPT = 64


class Grammars:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.to_str()
        self._lock = threading.Lock()
        self._tokenizers: dict[tuple[int, tuple[int, ...]], LLTokenizer] = {}  # by vocabulary and end tokens
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()  # by model and grammar

    def matcher(self, grammar: str, model: ModelInfo) -> LLMatcher:
        """A matcher of its own for one output."""
        with self._lock:
            key = model.model_digest, grammar
            if key not in self._compiled:
                self._compiled[key] = LLMatcher(self._tokenizer(model), grammar, log_level=0)
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return self._compiled[key].deep_copy()

    def _tokenizer(self, model: ModelInfo) -> LLTokenizer:
        of_model = model.vocab_size, tuple(model.eos_token_ids)
        if of_model not in self._tokenizers:
            ends = list(model.eos_token_ids)
            self._tokenizers[of_model] = LLTokenizer(self._text, n_vocab=model.vocab_size, eos_token=ends)
        return self._tokenizers[of_model]
