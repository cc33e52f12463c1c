"""Grammars for tests, in llguidance's form, and the bundled tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.sampling.grammar import GrammarMask
from tests.checkout import DEMO

TOKENIZER = DEMO / "target" / "tokenizer.json"
VOCAB = 4096


def of_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": r"[ \n]{0,4}"})


_ITEM = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/item"}}]}

GRAMMARS = {
    "object": of_schema({"type": "object"}),
    "anything": of_schema({}),
    "arrays": of_schema({"type": "array", "items": {"type": "array", "items": {"type": "number"}}}),
    "recursive": of_schema({"$defs": {"item": _ITEM}, "$ref": "#/$defs/item"}),
    "closed": of_schema(
        {
            "type": "object",
            "properties": {"a": {"enum": ["x", "xy", "xyz"]}, "ab": {"type": "integer"}, "abc": {"type": "boolean"}},
            "additionalProperties": False,
        }
    ),
    "strings": of_schema({"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5}),
    "dates": of_schema({"type": "array", "items": {"type": "string", "format": "date-time"}}),
    "regex": LLMatcher.grammar_from_regex(r"([a-z]+ ?)+\."),
    "overlap": LLMatcher.grammar_from_regex(r"(a|ab|abc|[0-9]+|[0-9]+\.[0-9]+)*"),
    "numbers": LLMatcher.grammar_from_lark('start: NUM ("," NUM)*\nNUM: /-?[0-9]+(\\.[0-9]+)?/'),
    "expression": LLMatcher.grammar_from_lark(
        'start: sum\nsum: sum "+" term | term\nterm: "(" sum ")" | NUM | NAME\n'
        "NUM: /[0-9]+(\\.[0-9]+)?/\nNAME: /[a-z]+/"
    ),
    "keywords": LLMatcher.grammar_from_lark('start: (WORD " "?)*\nWORD: "if" | "in" | "int" | /[a-z]+[0-9]*/'),
}

AMBIGUOUS = LLMatcher.grammar_from_lark('start: s\ns: s s s s s | /a/ | /[ab]/ | ""')
"""A mask takes longer with each token: 0.2 s after 240."""

AMBIGUOUS_AFTER_A = LLMatcher.grammar_from_lark(
    'start: "b" /[0-9]+/ | "a" s\ns: s s s s s s s | /a/ | /[ab]/ | /[a-z]/ | ""'
)
"""The first mask behind an "a" is beyond the limits."""


def random_tree(rng: random.Random, mask: GrammarMask, output: Sequence[int], truth: Sequence[int] = ()) -> TokenTree:
    """A tree below ``output``: some of the tokens that come in ``truth``, and random ones that the grammar allows, so
    that siblings begin other lexemes. ``mask``: at the beginning of an output."""
    tree, states = EMPTY_TREE, [mask.copy()]
    assert all(map(states[0].advance, output))
    parent = ROOT
    for token in truth[: rng.randint(0, 3)]:
        tree, parent = _with_child(tree, states, parent, token), len(tree)
    for _ in range(rng.randint(1, 5)):
        parent = rng.randrange(ROOT, len(tree))
        if possible := tokens_of(states[1 + parent].copy()):
            tree = _with_child(tree, states, parent, rng.choice(possible))
    return tree


def _with_child(tree: TokenTree, states: list[GrammarMask], parent: int, token: int) -> TokenTree:
    state = states[1 + parent].copy()
    if (parent, token) in tree.edges or not state.advance(token):
        return tree
    states.append(state)
    return tree.extended([Candidate(parent, token)])


def tokens_of(mask: GrammarMask) -> list[int]:
    """What is allowed, but for the end."""
    bits = mask.allowed() or b""
    return [token for token in range(1, VOCAB) if token // 8 < len(bits) and bits[token // 8] >> token % 8 & 1]
