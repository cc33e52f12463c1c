"""The grammar that a request asks for: from its four forms to llguidance's. Knows requests; does not know tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import GRAMMAR, ModelInfo
from specdec.transport.sampling_wire import MAX_GRAMMAR_BYTES
from specdec.v1 import generation_pb2

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_FORMS = ("grammar", "json_schema", "regex", "choices")
_SPACES: JsonCompileOptions = {"whitespace_pattern": r"[\x20\n\r\t]{0,16}"}
"""Between the parts of JSON: without a bound, weak models write spaces for ever. A schema's x-guidance overrides it."""

_NOT_WITH = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
"""Each could forbid all that the grammar allows."""


def problems(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Iterator[tuple[str, str]]:
    """(field, problem), without a look at the grammar itself."""
    given = [name for name in _FORMS if getattr(message, name) or (name != "choices" and message.HasField(name))]
    if not given:
        return
    if len(given) > 1:
        yield given[1], f"not possible with {given[0]}"
    if GRAMMAR not in target.capabilities:
        yield given[0], "not supported by this target"
    for name in _NOT_WITH:
        if getattr(message, name):
            yield name, f"not possible with {given[0]}"
    texts = list(message.choices) if given[0] == "choices" else [getattr(message, given[0])]
    if not all(texts):
        yield given[0], "must not be empty"
    if (size := sum(len(text.encode()) for text in texts)) > MAX_GRAMMAR_BYTES // 2:
        yield given[0], f"at most {MAX_GRAMMAR_BYTES // 2} bytes, not {size}"


def read(message: generation_pb2.GenerateRequest) -> str:
    """The grammar that a request asks for, checked; empty: none. Takes up to some ten milliseconds. Raises
    InvalidArgument."""
    name, grammar = _of(message)
    if name:
        is_error, found = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_error:
            raise InvalidArgument([(name, " ".join(found[0].split())[:500])])
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidArgument([(name, f"at most {MAX_GRAMMAR_BYTES} bytes as llguidance writes it")])
    return grammar


def _of(message: generation_pb2.GenerateRequest) -> tuple[str, str]:
    """The field and its grammar in llguidance's form."""
    if message.HasField("json_schema"):
        try:
            return "json_schema", LLMatcher.grammar_from_json_schema(message.json_schema, defaults=_SPACES)
        except ValueError as error:
            raise InvalidArgument([("json_schema", f"is not JSON: {error}")]) from error
    if message.HasField("regex"):
        return "regex", LLMatcher.grammar_from_regex(message.regex)
    if message.choices:
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in message.choices)
        return "choices", LLMatcher.grammar_from_lark(f"start: {texts}")
    if message.HasField("grammar"):
        return "grammar", LLMatcher.grammar_from_lark(message.grammar)
    return "", ""
