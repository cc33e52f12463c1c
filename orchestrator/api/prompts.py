"""Prompts -> token ids, and the fewest ids that a prompt can have, which is known before it is tokenized.

Knows the tokenizer and the chat template; does not know the rest of a request. ``Prompts.ids`` takes a second for the
longest texts. Most of that is spent without the interpreter's lock, so a thread can do it next to the event loop.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from orchestrator.api.chat import conversation
from orchestrator.tokenizer.chat_template import ChatTemplate
from specdec.sampling.token_bytes import TokenBytes
from specdec.v1 import generation_pb2

Message = generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest

_SHRINKS = {"NFC": 4, "NFD": 1, "NFKC": 18, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Characters of the text per character after the normalizer, at most. One character decomposes into 1 to 4 (NFD) or 1
to 18 (NFKD), and a composed text decomposes into the same ones as the text."""

_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}
"""Pre-tokenizers that drop no character, unless their behavior is "Removed"."""

_LAST = 16
"""Tokens of a prompt's end: a tag of reasoning, and white space."""


class Prompts:
    """``tokenizer``: None if only token ids are served. ``template``: None if the model cannot chat.
    ``special_tokens``: by name, such as bos_token."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special_tokens = special_tokens or {}
        self._max_characters = characters_per_token(tokenizer) if tokenizer else None
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Tokens without text in an output, by what stands for them in a prompt."""
        self.token_bytes = TokenBytes(tokenizer) if tokenizer else None

    def fewest_ids(self, message: generation_pb2.GenerateRequest) -> int:
        """The number of ids of the prompt, or a lower bound of it."""
        if message.WhichOneof("prompt") == "token_ids":
            fewest = len(message.token_ids.token_ids)
        else:  # a template may leave out any part of a conversation
            fewest = -(-len(message.text) // self._max_characters) if self._max_characters else 0
        return min(fewest, message.truncate_prompt_tokens) if message.truncate_prompt_tokens else fewest

    def ids(self, message: generation_pb2.GenerateRequest) -> array[int]:
        """The ids of the prompt. Raises InvalidArgument if the chat template refuses the conversation."""
        if message.WhichOneof("prompt") == "token_ids":
            ids = array("I", message.token_ids.token_ids)
        else:
            ids = self.tokenized(message)
        return ids[-message.truncate_prompt_tokens :]

    def end(self, ids: array[int]) -> str:
        """The last words of a prompt, without white space behind them."""
        last = ids[-_LAST:].tolist()
        return self.tokenizer.decode(last, skip_special_tokens=False).rstrip() if self.tokenizer else ""

    def tokenized(self, message: Message) -> array[int]:
        """The ids of a text or a conversation. Raises InvalidArgument as above."""
        is_chat = message.WhichOneof("prompt") == "chat"
        adds = message.add_special_tokens if message.HasField("add_special_tokens") else not is_chat
        if not is_chat:
            return self.encoded(message.text, adds)
        assert self.template is not None, "refused before"
        ids = self.encoded(self.template.render(conversation(message.chat)), adds)
        # The template may have written the token that the tokenizer begins with.
        twice = adds and len(ids) > 1 and ids[0] == ids[1] and ids[0] in self.special_ids.values()
        return ids[1:] if twice else ids

    def encoded(self, text: str, add_special_tokens: bool) -> array[int]:
        assert self.tokenizer is not None, "refused before"
        # ``encode`` would keep the interpreter's lock, and so stop the event loop.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """Characters of a text that one token can stand for, at most; None: any number, or it is not known.

    A bound exists where no character is lost on its way into tokens: a byte-level BPE model, or one that falls back to
    bytes, behind parts that are known to keep them. A token cannot be longer than the longest of the vocabulary then.
    """
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    splits = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    shrinks = math.prod(map(_shrink, normalizers))
    if any(part["type"] not in _KEEPS_ALL or part.get("behavior") == "Removed" for part in splits):
        return None
    if any(added.lstrip or added.rstrip for added in tokenizer.get_added_tokens_decoder().values()):
        return None  # such a token takes in all spaces next to it
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not shrinks or not isinstance(tokenizer.model, BPE):
        return None
    if tokenizer.model.byte_fallback:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    elif any(part["type"] == "ByteLevel" for part in (*normalizers, *splits)):
        alphabet = ByteLevel.alphabet()
    else:
        return None  # what is not in the vocabulary is dropped, or many characters become one unknown token
    return shrinks * max(map(len, vocabulary)) if vocabulary.keys() >= set(alphabet) else None


def _parts(component: Any, inner: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json describes them."""
    return _flat(json.loads(component.__getstate__()), inner) if component is not None else []


def _flat(part: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [flat for nested in part[inner] for flat in _flat(nested, inner)]


def _shrink(part: dict[str, Any]) -> int:
    """Characters of the text per character after this part of a normalizer, at most; 0: not bounded."""
    if part["type"] != "Replace":
        return _SHRINKS.get(part["type"], 0)
    replaced = part["pattern"].get("String", "")
    return -(-len(replaced) // len(part["content"])) if replaced and part["content"] else 0
