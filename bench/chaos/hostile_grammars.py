"""Generates grammars that strain a compiler: extreme numbers, deep nesting, cycles, ambiguity, huge repetitions.

Knows the languages of schemas, regular expressions and Lark; does not know what is refused.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 32_000

_NUMBERS = (
    *(sign * 2**power + step for sign in (-1, 1) for power in (53, 62, 63, 64) for step in (-513, -1, 0, 1, 1025)),
    *(0, -1, 0.1, 1e-9, 5e-324, 1e308, -1e300, 1e18, 65537, 1000003, 16777213, 1000.003),
)
_KEYWORDS = ("const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (0, 1, 7, 999, 100_000, 2**31 - 1, 2**32, 2**63, 2**64 - 1)
_UNICODE = ("é", "\U0001f600", "\u202e", "\0", "\ud800", '"', "\\", "a/b~1", "$ref", "", "\uffff")
_PATTERNS = r"""
^.*{a}.*$|zz
[ab]*{a}[ab]{{{n}}}
(a+)+{a}
({a}{{0,{n}}}){{0,{n}}}
.{{0,{n}}}{a}
(\w{{1,50}} ?){{1,{n}}}
\p{{L}}{{0,{n}}}\p{{N}}
(?={a})b
(?<!{a})b
({a})\1
(?i:é{a}){{{n}}}
(.*{a}.{{{n}}})&(.*b.{{{n}}})
~(.*{a})
[^\x00-\x{{10FFFF}}]
(x?){{{n}}}x{{{n}}}
{a}{{{n}}}
\b{a}\B$^
((((({a}{{9}}){{9}}){{9}}){{9}}){{9}}){{9}}
""".strip().splitlines()


def regex(chance: random.Random) -> str:
    if chance.random() < 0.2:
        depth = chance.choice((50, 200, 2000, 8000))
        ends = chance.choice((")", ")*", ")?", "){2}"))
        return "(" * depth + "a" + ends * depth
    parts = [
        chance.choice(_PATTERNS).format(
            a=chance.choice(string.ascii_letters), n=chance.choice((1, 20, 300, 5000, 10**6))
        )
        for _ in range(chance.choice((1, 1, 2, 5, 30)))
    ]
    return chance.choice(("", "|", ".*")).join(parts)


def _numbers(chance: random.Random) -> Any:
    names = chance.sample(_KEYWORDS, chance.randint(1, 3))
    schema: dict[str, Any] = {name: chance.choice(_NUMBERS) for name in names}
    return schema | {"type": chance.choice(("integer", "number"))} if chance.random() < 0.8 else {"enum": [schema]}


def _deep(chance: random.Random) -> Any:
    schema: Any = {}
    for _ in range(chance.choice((20, 60, 120, 500))):
        key = chance.choice(("items", "additionalProperties", "not", "allOf", "anyOf", "oneOf", "prefixItems", "const"))
        schema = {key: [schema] if key.endswith(("Of", "Items")) else schema}
    return schema


def _cycle(chance: random.Random) -> Any:
    names = [f"d{number}" for number in range(chance.choice((1, 2, 5, 400)))]
    places = ("allOf", "anyOf", "oneOf", "items", "$ref", "patternProperties")
    definitions: dict[str, Any] = {}
    for number, name in enumerate(names):
        refs = [{"$ref": f"#/$defs/{chance.choice((*names[number + 1 : number + 2], *names))}"} for _ in range(2)]
        place = chance.choice(places)
        definitions[name] = {
            "$ref": refs[0],
            "items": {"items": refs[0]},
            "patternProperties": {"patternProperties": {".*": refs[0]}},
        }.get(place, {place: refs})
        if place == "$ref":
            definitions[name] = refs[0]
    return {"$ref": "#/$defs/d0", "$defs": definitions, **chance.choice(({}, {"type": "object"}, {"minItems": 2}))}


def _many(chance: random.Random) -> Any:
    size = chance.choice((5, 12, 16, 26, 60))
    each: Callable[[int], Any] = chance.choice(
        (
            lambda _: {"type": "string", "pattern": regex(chance)[:200]},
            lambda number: {"type": "string", "pattern": f"^.*{chr(97 + number % 26)}.*$|zz"},
            lambda number: {"type": "integer", "multipleOf": 2 + number},
            lambda number: {"anyOf": [{"const": [number, side]} for side in range(3)]},
            lambda number: {"properties": {f"p{number}": {"type": "null"}}, "required": [f"p{number + 1}"]},
        )
    )
    return {chance.choice(("allOf", "allOf", "anyOf", "oneOf")): [each(number) for number in range(size)]}


def _large(chance: random.Random) -> Any:
    count = chance.choice(_COUNTS)
    size = chance.choice((1, 100, 1000, 2500))
    return chance.choice(
        (
            {"type": "string", "minLength": count, "maxLength": chance.choice(_COUNTS)},
            {"type": "string", "pattern": chance.choice(("(a|bb)*", ".*")), "minLength": count},
            {"type": "array", "minItems": count, "maxItems": chance.choice(_COUNTS), "items": _numbers(chance)},
            {"type": "object", "minProperties": count, "additionalProperties": {"type": "object"}},
            {"enum": [chance.choice((number, str(number), [number], {"a": number})) for number in range(size)]},
            {"type": "object", "properties": {f"{chance.choice(_UNICODE)}{n}": {} for n in range(size)}},
            {"type": "object", "required": [chance.choice(_UNICODE) * count for count in range(size % 300)]},
            {"patternProperties": {regex(chance)[:99]: {"const": n} for n in range(size % 99)}},
            {"x-guidance": {"whitespace_pattern": regex(chance)[:500]}, "type": "array"},
            {"prefixItems": [{}] * size},
        )
    )


def schema(chance: random.Random) -> str:
    text = json.dumps(chance.choice((_numbers, _numbers, _deep, _cycle, _many, _large))(chance))
    return text if chance.random() < 0.9 else text[: chance.randrange(len(text))] + chance.choice('{["\0,')


_RULES = [
    rule.replace(r"\n", "\n")
    for rule in r"""
s: s s s s s | /a/ | /[ab]/ | {e}
s: s s | "a"
s: s
s: s | s s | {e}
s: (s*)* | /a/
s: "a" s s | s "a" |
s: (/a?/ {e}?){{0,{n}}}
s: ("a"{{1,{n}}}){{1,{n}}}
s: /{r}/ | /{r}/ | s s
s: /.*/ /[a-z]*/ /.*/
s: "a"? s?
s: %json {j}
s: (%json {j}) s
s: %regex {{"substring_chars": "{t}"}}
s: T\nT: T T | /a/
s: T+\nT: /{r}/ & /{r}/
s: p::{n}\np::_: {e} {e}
s: p::0\np::_: "x" | p::incr(_) p::decr(_)
s[lazy]: /{r}/
s[max_tokens={n}]: /.*/
s: <[0-{n}]>{{1,{n}}}
s: <|endoftext|>
%ignore /{r}/\ns: /a/+
s: "é"i{{{n}}}
s: @s
s: "b".."a"
s -> x: s
""".strip().splitlines()
]


def _permutations(size: int) -> str:
    """Of a parametric rule: one state for each subset."""
    kinds = "".join(f'\n | "a" p::set_bit({bit}) %if bit_clear({bit})' for bit in range(size))
    return f'start: p::0x0\np::_: ""{kinds}'


def lark(chance: random.Random) -> str:
    kind, size = chance.random(), chance.choice((3, 20, 100, 1000, 3000))
    if kind < 0.1:
        name = chance.choice("rR")
        body = chance.choice(("{0}", "{0} {0}", "{0} {0} | ", "/a/ {0}", "{0}? | /a/"))
        rules = [f"{name}{n}: " + body.format(f"{name}{n + 1}") for n in range(size)]
        return "\n".join((f"start: {name}0", *rules, f'{name}{size}: "x"'))
    if kind < 0.2:
        opening, closing = chance.choice(
            (("(", ")"), ("(", ")*"), ("[", "]"), ("~", ""), ('"a" | ', ""), ("/a/? ", ""))
        )
        return f"start: {opening * size}/a/{closing * size}"
    if kind < 0.22:
        return _permutations(chance.choice((4, 12, 20, 60)))
    filled = {"e": chance.choice(('""', '"a"', "/a*/")), "n": chance.choice((1, 9, 400, 100_000, 2**32, 2**64 - 1))}
    filled |= {"r": regex(chance)[:200].replace("/", ""), "j": schema(chance)[:4000], "t": "ab" * size}
    text = "\n".join(("start: s", chance.choice(_RULES).format(**filled)))
    return text if chance.random() < 0.9 else text[: chance.randrange(len(text))]


def choices(chance: random.Random) -> list[str]:
    size = chance.choice((1, 50, 1000))
    return [chance.choice((*_UNICODE[:4], "a" * (n % 200), f"{n}")) for n in range(size)]


FORMS: dict[str, Callable[[random.Random], Any]] = {
    "json_schema": schema,
    "regex": regex,
    "grammar": lark,
    "choices": choices,
}
"""By the field of a request. All texts of one have at most MOST_CHARACTERS characters, after a cut."""
