"""The description of a pass has every row once, with the slots of its own text and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from specdec.backends.cuda import plan as of_plan
from specdec.backends.cuda.plan import ALL, PADDING, ROWS, RUN, Inputs, Plan, Shape
from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import PassRows, Segment

BLOCK = 16


def random_segments(rng: random.Random, most_rows: int, most_context: int) -> list[Segment]:
    """Chains and trees of sequences with blocks in no order, some with rows of earlier passes."""
    free = rng.sample(range(20_000), 20_000)
    segments = []
    for _ in range(rng.randint(1, 5)):
        num_context, num_rows = rng.choice([0, 1, 15, rng.randint(0, most_context)]), rng.randint(1, most_rows)
        reach = rng.choice([1, 1, 4])
        parents = [rng.randrange(max(-1, row - reach), row) if row else -1 for row in range(num_rows)]
        num_kept = rng.choice([0, 0, rng.randrange(num_rows)])
        table = [free.pop() for _ in range(-(-(num_context + num_rows) // BLOCK))]
        ids = [rng.randrange(1000) for _ in range(num_rows - num_kept)]
        segments.append(Segment(ids, parents, num_context, table, range(num_kept, num_rows)))
    return segments


def sections_of(shape: Shape) -> dict[str, np.ndarray]:
    """Filled with nonsense."""
    return {name: np.full(size, 77_777, kind) for name, kind, size in shape.sections}


def written(plan: Plan, shape: Shape, inputs: Inputs | None = None) -> dict[str, np.ndarray]:
    sections = sections_of(shape)
    plan.write(sections, inputs)
    return sections


def expected_slots(segments: Sequence[Segment]) -> list[list[int]]:
    """Of each row of the pass, the slots of its text up to its own."""
    slots = []
    for segment in segments:
        slot = [
            segment.block_table[position // BLOCK] * BLOCK + position % BLOCK
            for position in range(segment.num_context + len(segment.parents))
        ]
        for row in range(segment.num_kept, len(segment.parents)):
            path = [row]
            while segment.parents[path[0]] >= 0:
                path.insert(0, segment.parents[path[0]])
            slots.append([*slot[: segment.num_context], *(slot[segment.num_context + above] for above in path)])
    return slots


def read_slots(sections: dict[str, np.ndarray]) -> dict[int, list[int]]:
    """Of each row that an item computes, the slots that a kernel reads for it."""
    read: dict[int, list[int]] = {}
    for chain, first, run, num_runs in sections["items"].tolist():
        if chain < 0:
            continue
        start, count, keys, table, tail, tail_from = sections["chains"][chain].tolist()
        begin, end = (0, keys) if run == ALL else (run * RUN, min(keys, run * RUN + RUN))
        assert run < num_runs
        for row in range(first, min(first + ROWS, count)):
            position = keys - count + row
            blocks = sections["blocks"]
            slots = [
                int(blocks[table + p // BLOCK] * BLOCK + p % BLOCK if p < tail_from else blocks[tail + p - tail_from])
                for p in range(begin, end)
                if p <= position
            ]
            at = int(sections["chain_rows"][start + row])
            assert run <= 0 or at in read, "runs are in order"
            assert run > 0 or at not in read, "a row is computed once"
            read.setdefault(at, []).extend(slots)
    return read


@pytest.mark.parametrize(("most_rows", "most_context"), [(9, 40), (40, 100), (3, 1700), (150, 600)])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_reads_the_slots_of_its_text_and_padding_none(seed: int, most_rows: int, most_context: int) -> None:
    segments = random_segments(random.Random(seed), most_rows, most_context)
    rows = PassRows(segments, BLOCK)
    plan = Plan.of(rows, BLOCK)
    for shape in (plan.shape(), plan.shape().class_of()):
        sections = written(plan, shape)
        read, slots = read_slots(sections), expected_slots(segments)
        assert {row: read[row] for row in range(len(rows))} == dict(enumerate(slots))
        assert all(read[row] == [] for row in range(len(rows), shape.rows)), "padding is in an item, and sees nothing"
        assert sections["slots"].tolist() == [*rows.slots, *[PADDING] * (shape.rows - len(rows))]
        assert sorted(read) == list(range(shape.rows))


def test_a_long_prompt_is_computed_in_whole_items_and_a_few_rows_in_runs() -> None:
    table = list(range(300))
    few = Plan.of(PassRows([Segment.chain([1] * 5, 4000, table)], BLOCK), BLOCK)
    many = Plan.of(PassRows([Segment.chain([1] * 520, 3480, table)], BLOCK), BLOCK)
    assert len(few.items) == 8
    assert few.shape().in_runs
    assert len(many.items) == 65
    assert not many.shape().in_runs


def test_size_classes_have_room_and_never_a_single_row() -> None:
    for rows in (1, 2, 16, 17, 100, 512, 513, 1025, 1600):
        for items in (1, rows, 3 * rows):
            shape = Shape(rows, rows, items, rows * 8, False)
            padded = shape.class_of()
            assert all(size >= least for size, least in zip(padded[:4], shape[:4], strict=True))
            assert padded.rows >= 16
            assert padded.items >= items + -(-(padded.rows - rows) // ROWS)
            assert padded.class_of().rows == padded.rows


def test_inputs_are_padded_with_rows_that_are_drawn_greedily() -> None:
    rows = PassRows([Segment.chain([5, 6, 7], 0, [3])], BLOCK)
    plan = Plan.of(rows, BLOCK)
    draws = [Draw(SamplingParams(0.7), 2**63 + 5, 9), None, Draw(SamplingParams(0.5, top_k=3), 1, 2)]
    shape = plan.shape(3).class_of()
    sections = written(plan, shape, Inputs([5, 6, 7], [0, 1, 2], [0, 1, 2], draws))
    assert sections["token_ids"].tolist() == [5, 6, 7, *[0] * 13]
    assert sections["positions"].tolist() == [0, 1, 2, *[0] * 13]
    assert sections["logit_rows"].tolist() == [0, 1, *[2] * 14]
    assert sections["seeds"].tolist() == [2**63 + 5 - 2**64, *[0] * 15]
    assert sections["temperatures"].tolist() == [0.7, *[0.0] * 15]
    assert sections["draw_positions"].tolist()[:2] == [9, 0]


def test_the_next_pass_feeds_one_row_behind_each_chain() -> None:
    segments = [Segment.chain([1, 2], 14, [5, 9], logit_rows=[1]), Segment.chain([3], 3, [7], logit_rows=[0])]
    rows = PassRows(segments, BLOCK)
    plan = Plan.of(rows, BLOCK).next(rows.last_rows, 3)
    sections = written(plan, plan.shape(2).class_of())
    assert sections["slots"].tolist()[:3] == [9 * BLOCK, 7 * BLOCK + 4, PADDING]
    chains = sections["chains"]
    assert chains[:3, of_plan.KEYS].tolist() == [17, 5, 0]
    assert sections["blocks"][chains[0, of_plan.TABLE] :][:2].tolist() == [5, 9]
