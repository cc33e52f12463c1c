"""The parts of bench peers that need no model: calibration, turns, sums and tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from bench.peers import table
from bench.peers.calibration import calibrate
from bench.peers.chart import draw
from bench.peers.contender import Contender, Kind, Run, Settings, before_end
from bench.peers.measuring import Row, take_turns
from bench.peers.prompts import PromptSource
from bench.peers.ratios import KEYS, ratios
from bench.peers.services import figures_of
from specdec.v1.generation_pb2 import SpeculationStats


def row(kind: Kind, streams: int, *rates: float, **figures: float) -> Row:
    runs = [Run(1 / rate, [[7]], figures) for rate in rates]
    return Row(kind, streams, Settings((1,)), identical=1, compared=2, runs=runs)


RATES = {
    Kind.GENERATE: 10.0,
    Kind.ASSISTED: 20.0,
    Kind.LOOP_ALONE: 15.0,
    Kind.LOOP: 30.0,
    Kind.PADDED: 40.0,
    Kind.ALONE: 12.0,
}


def every_row() -> list[Row]:
    single = (Kind.GENERATE, Kind.ASSISTED, Kind.LOOP_ALONE, Kind.LOOP, Kind.ALONE)
    # The median of the turns counts, whichever of them were slow.
    rows = [row(kind, 1, RATES[kind], 2 * RATES[kind], RATES[kind] / 2) for kind in single]
    rows.append(row(Kind.OURS, 1, 1.0, 50.0, 90.0, mean_draft_tokens=5.5))
    for streams in (4, 16, 32):
        rows += [row(kind, streams, RATES[kind]) for kind in (Kind.PADDED, Kind.ALONE)]
        rows.append(row(Kind.OURS, streams, 60.0))
    return rows


async def test_calibration_finds_the_best_and_tries_nothing_hopeless_at_length():
    rates = {((1,), 4): 50.0, ((1,), 6): 60.0, ((1,), 8): 40.0, ((2,), 6): 55.0, ((2,), 4): 99.0, ((9,), 6): 0.5}
    rates[(2,), 8] = 10.0
    tried: list[tuple[tuple[int, ...], int | None, int]] = []

    async def run(settings, prompts, max_tokens):
        tried.append((settings.threads, settings.num_draft_tokens, max_tokens))
        return Run(max_tokens / rates[settings.threads, settings.num_draft_tokens], [[0] * max_tokens])

    contender = Contender(Kind.ASSISTED, 1, run, [(9,), (2,), (1,)], (4, 6, 8))
    # The best threads with the middle number of draft tokens need not be the best with another.
    assert await calibrate(contender, [[[1]]], 32) == Settings((2,), 4)
    assert [max_tokens for threads, _, max_tokens in tried if threads == (9,)] == [4]
    tried.clear()
    assert await calibrate(contender, [[[1]]], 32, thorough=False) == Settings((1,), 6)
    assert [max_tokens for _, _, max_tokens in tried] == [4, 4, 4, 32, 32, 32]


async def test_calibration_sums_over_all_texts_and_repeats_close_results_at_twice_the_length():
    seconds = {(4, 1): 1.0, (4, 2): 9.0, (6, 1): 2.0, (6, 2): 2.0}
    tried: list[tuple[int, int]] = []

    async def by_text(settings, prompts, max_tokens):
        tried.append((settings.num_draft_tokens, prompts[0][0]))
        return Run(seconds[tried[-1]], [[0] * max_tokens])

    assert await calibrate(Contender(Kind.ASSISTED, 1, by_text, [(1,)], (4, 6)), [[[1]], [[2]]], 8) == Settings((1,), 6)
    assert tried[1:] == [(4, 1), (6, 1), (4, 2), (6, 2)], "in turn, after the probe"
    tried.clear()

    async def by_length(settings, prompts, max_tokens):
        rate = {4: 60.0, 6: {8: 58.0, 16: 70.0}.get(max_tokens, 1.0), 8: 30.0}[settings.num_draft_tokens]
        tried.append((settings.num_draft_tokens, max_tokens))
        return Run(max_tokens / rate, [[0] * max_tokens])

    assert await calibrate(Contender(Kind.ASSISTED, 1, by_length, [(1,)], (4, 6, 8)), [[[1]]], 8) == Settings((1,), 6)
    assert tried[1:] == [(4, 8), (6, 8), (8, 8), (4, 16), (6, 16)]


async def test_contenders_take_turns_on_the_same_prompts_and_are_compared():
    calls: list[tuple[Kind, list[int]]] = []

    def contender(kind: Kind, says: int) -> tuple[Contender, Settings]:
        async def run(settings, prompts, max_tokens):
            calls.append((kind, prompts[0]))
            return Run(1.0, [[says] * max_tokens for _ in prompts])

        return Contender(kind, 2, run, [(1,)]), Settings((1,))

    async def reference(prompt, max_tokens):
        return [5] * max_tokens

    rows = await take_turns(
        [contender(Kind.PADDED, 5), contender(Kind.ALONE, 5), contender(Kind.OURS, 6)],
        PromptSource(100),
        reference,
        prompt_length=3,
        max_tokens=4,
        repeats=3,
        num_compared=1,
    )
    kinds = [Kind.PADDED, Kind.ALONE, Kind.OURS]
    for number, turn in enumerate((calls[:3], calls[3:6], calls[6:])):
        assert [kind for kind, _ in turn] == [*kinds[number:], *kinds[:number]]
        assert len({tuple(prompt) for _, prompt in turn}) == 1
    assert len({tuple(prompt) for _, prompt in calls}) == 3, "a repetition has prompts of its own"
    assert [(each.identical, each.compared) for each in rows] == [(3, 3), (3, 3), (0, 3)]
    assert rows[0].tokens_per_s == 8


def test_every_ratio_is_right_and_absent_where_nothing_was_measured():
    figures = ratios(every_row())
    assert tuple(figures) == KEYS
    assert figures == {
        "grpc_over_assisted": 1.25,
        "grpc_over_generate": 2.5,
        "alone_over_generate": 1.2,
        "alone_over_inprocess": 0.8,
        **{f"streams_{streams}_over_batch": 1.5 for streams in (4, 16, 32)},
        **{f"speculation_on_over_off_{streams}": 5.0 for streams in (4, 16, 32)},
    }
    rows = [each for each in every_row() if each.streams == 4]
    assert set(ratios(rows)) == {"streams_4_over_batch", "speculation_on_over_off_4"}


def test_prompt_lookup_tokens_do_not_count_as_the_drafts():
    told = SpeculationStats(num_rounds=11, num_drafts=8, num_draft_tokens=40, num_accepted_tokens=25, num_replays=1)
    told.num_lookup_tokens, told.num_accepted_lookup_tokens = 20, 15
    found = {"mean_draft_tokens": 2.0, "acceptance": 0.5, "mean_lookup_tokens": 2.0}
    assert figures_of([told, told]) == {**found, "replays": 2.0}
    assert not any(figures_of([SpeculationStats(num_rounds=1)]).values())


def test_prompts_are_fresh_and_of_their_length_and_outputs_end_before_an_end_token():
    for source in (PromptSource(50), PromptSource(50, text=range(500))):
        first, second = source.take(1, 20)[0], source.take(1, 20)[0]
        assert len(first) == len(second) == 20
        assert first != second
    with pytest.raises(ValueError, match="500"):
        PromptSource(50, text=range(500)).take(1, 501)
    assert before_end([3, 4, 0, 0], [0]) == before_end([3, 4], [0]) == [3, 4]
    assert before_end([3, 0], []) == [3, 0]


def test_the_table_shows_the_ratios_and_lookups_apart(capsys):
    console = Console(width=100, force_terminal=False)
    console.print(table.contenders(every_row()))
    lines = capsys.readouterr().out.splitlines()
    ours = [line.split() for line in lines if line.strip().startswith("our services ")]
    assert [words[2:4] for words in ours] == [["50.0", "1.25"], *[["60.0", "1.50"]] * 3]
    assert max(map(len, lines)) <= 100
    assert table.lookups_in_words(every_row()) == ""
    rows = [*every_row(), row(Kind.OURS, 8, 1.0, mean_lookup_tokens=1.25)]
    assert table.lookups_in_words(rows).endswith("instead: our services, 8 at a time 1.2")


def test_the_chart_is_a_picture(tmp_path):
    draw(every_row(), "title", "subtitle", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
