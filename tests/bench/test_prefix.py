"""bench prefix: what is found again, and a favoured target that is killed, with table models behind the services."""

from __future__ import annotations

import pytest

from bench import prefix


@pytest.mark.slow
async def test_prompts_that_begin_alike_are_found_again_and_texts_survive_a_target() -> None:
    load = prefix.Load(num_conversations=4, num_turns=2, cached_ids=8192)
    figures = await prefix.measure(load, repeats=1)
    assert set(figures) == {prefix.BY_LOAD, prefix.BY_PREFIX, prefix.BY_TWO, prefix.KILLED}
    for name, of_contender in figures.items():
        summary = of_contender.summary()
        assert (summary["requests"], summary["wrong"]) == (8, 0), name
        assert (summary["hits"] + summary["spills"] >= 8) is (name != prefix.BY_LOAD), name
    # At most the first turn of each: 592 of the 560 and 640 ids of both turns. Few requests spill more.
    assert 0 < figures[prefix.BY_PREFIX].summary()["cached share"] <= 592 / 1200
