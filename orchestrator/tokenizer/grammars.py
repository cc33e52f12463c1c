"""Grammars at the beginning of an output, for the tokens that they force, by the model that is asked for them."""

from __future__ import annotations

import threading

from llguidance import LLMatcher
from tokenizers import Tokenizer

from specdec.core.rounds import ModelInfo
from specdec.sampling.matchers import Matchers


class Grammars:
    """Of one tokenizer. Its calls take up to some hundred milliseconds, and come from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.to_str()
        self._lock = threading.Lock()
        self._by_model: dict[tuple[int, tuple[int, ...]], Matchers] = {}  # by vocabulary and end tokens

    def matcher(self, grammar: str, model: ModelInfo) -> LLMatcher:
        """See specdec.sampling.matchers.Matchers."""
        key = model.vocab_size, tuple(model.eos_token_ids)
        with self._lock:
            if key not in self._by_model:
                self._by_model[key] = Matchers(self._text, *key)
        return self._by_model[key].matcher(grammar)
