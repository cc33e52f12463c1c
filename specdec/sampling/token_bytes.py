"""Token ids -> the bytes that each stands for in a text."""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of a vocabulary's tokens, each computed when it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: str(token.content) for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level, self._word_piece = "ByteLevel" in kinds, "WordPiece" in kinds
        self._metaspace = bool(kinds & {"Metaspace", "Replace"})
        self._byte_fallback = "ByteFallback" in kinds
        self._by_id: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Of a special token, or one added to the vocabulary, its name. Empty where there is no token."""
        if token_id not in self._by_id:
            self._by_id[token_id] = self._compute(token_id)
        return self._by_id[token_id]

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = byte_of()
            return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in token)
        if self._byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._word_piece:
            return (token.removeprefix("##") if token.startswith("##") else f" {token}").encode()
        return (token.replace("\u2581", " ") if self._metaspace else token).encode("utf-8", "surrogatepass")


@cache
def byte_of() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies. Printable bytes stand for themselves, the others for the
    characters from 256 on, in their order."""
    alphabet = set(ByteLevel.alphabet())
    printable = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = [byte for byte in range(256) if chr(byte) not in printable]
    return printable | {chr(256 + index): byte for index, byte in enumerate(others)}


def _kinds(decoder: dict[str, object]) -> set[str]:
    inner = decoder.get("decoders")
    parts = [_kinds(part) for part in inner] if isinstance(inner, list) else []
    return {str(decoder["type"])}.union(*parts)
