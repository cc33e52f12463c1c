"""JSON as models write it is read in pieces, and becomes JSON that every parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lenient import BrokenValue, json_of, read_value
from gateway.pieces import Source

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
FORMS = (
    json.dumps,
    lambda value: json.dumps(value, ensure_ascii=False, indent=1),
    lambda value: json.dumps(value, separators=(",", ":")),
    repr,
)


@given(VALUES, st.sampled_from(FORMS))
def test_what_is_json_or_a_value_of_python_keeps_its_meaning(value: Any, form: Any) -> None:
    assert json_of(form(value)) == json.dumps(value, ensure_ascii=False)


@given(st.text(st.sampled_from("{}[]():,\"'\\\\uxd83cDC00nan1e9.-Tr \n\t<"), max_size=30), st.integers(1, 5))
def test_what_is_read_of_any_text_is_json_however_it_is_cut(text: str, size: int) -> None:
    whole, cut = (pieces_of(text, length) for length in (len(text) + 1, size))
    assert whole == cut
    written, is_whole = whole
    if is_whole:
        value = json.loads(written, parse_constant=pytest.fail)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def pieces_of(text: str, size: int) -> tuple[str, bool]:
    """What is written of a text that comes in pieces of a size, and whether it is a whole value."""
    source, written = Source(), list[str]()
    reading = read_value(source, written.append)
    try:
        for start in range(0, len(text), size):
            source.add(text[start : start + size])
            next(reading)
        source.finish()
        next(reading)
    except StopIteration:
        return "".join(written), True
    except BrokenValue:
        return "".join(written), False
    raise AssertionError("it waits for more at the end")


def test_depth_is_bounded() -> None:
    assert json_of("[" * 100 + "]" * 100) is not None
    assert json_of("[" * 101 + "]" * 101) is None
