"""Requests with and without speculation: a difference is found and made small, and the real services have none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.differential.__main__ import compare, running
from bench.differential.requests import draw


def _at_top_k(source: str, fields: dict[str, Any]) -> bool:
    return source == "draft" and "top_k" in fields


async def test_a_difference_is_found_and_keeps_only_the_options_that_it_needs():
    async def ask(source: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"text": "other" if _at_top_k(source, fields) else "same"}

    counts, found = await compare(ask, 1, range(120), ["draft", "lookup"], lambda: None)
    drawn = [draw(random.Random(f"1/{number}")) for number in range(120)]
    numbers = [number for number, asked in enumerate(drawn) if _at_top_k("draft", asked.fields)]
    assert sorted(each.number for each in found) == numbers
    assert len(numbers) == counts["gRPC", "draft"] + counts["HTTP", "draft"] > 10
    assert counts["gRPC", "lookup"] == counts["HTTP", "lookup"] == 0
    for each in found:
        prompts = {"prompt", "messages", "text", "token_ids", "chat"}
        assert each.fields.keys() - prompts == {"top_k", "max_tokens", "seed", "temperature"}
        assert each.places == [".text: 'same' alone, 'other'"]


@pytest.mark.slow
async def test_speculation_changes_no_field_of_any_answer():
    sources = ["draft", "lookup", "resumed"]
    async with running(sources, 1) as ask:
        counts, found = await compare(ask, 7, range(60), sources, lambda: None)
    assert found == []
    for api in ("gRPC", "HTTP"):
        assert counts[api, "refused"] < counts[api, "asked"] / 4, "most requests have answers to compare"
