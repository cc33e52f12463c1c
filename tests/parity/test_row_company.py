"""Law: the logits of a row do not depend on what its segment is packed with: on a CPU to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specdec.backends.torch import gathered_attention
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes import rows as packed_rows
from specdec.passes.rows import KeyCounts, Member, Segment
from specdec.runner.model_runner import ModelRunner
from tests.parity.conftest import load

MOST_ROWS = 64
LENGTHS = (0, 0, 1, 3, 17, 17, 40, 64, 90, 200)
NEAR_BOUNDARIES = (50, 60, 63, 64, 66, 120, 127, 130, 250, 255, 258, 510, 513)
SPANS = [(0, 150), (56, 70), (118, 136), (247, 262), (505, 518)]
"""Parts of a text: all of it, and those where the number of keys changes."""
RUNNERS = {"float32": None, "bfloat16": None, "bfloat16, by torch": "torch", "float32, static": "cuda"}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, device: str) -> ModelRunner:
    return load("target", request.param.partition(",")[0], device, RUNNERS[request.param])


@pytest.fixture
def cpu_runner() -> ModelRunner:
    """For mistakes that show in the bits of the CPU's kernels."""
    return load("target", "float32", backend="torch")


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two rows' logits are not the same: on other devices than a CPU not within what rounding explains."""
    if one.device.type == "cpu":
        return not torch.equal(one, other)
    return float((one.float() - other.float()).abs().max()) > (1e-3 if one.dtype is torch.float32 else 0.5)


@dataclass
class Sequence:
    """A sequence with its context in the cache."""

    runner: ModelRunner
    cache: SequenceCache

    def segment(self, rng: random.Random, num_rows: int, kind: str) -> Segment:
        """Rows to feed. ``chunk`` wants the last row's logits, ``chain`` and ``tree`` all."""
        parents = list(range(-1, num_rows - 1))
        if kind == "tree":
            parents = [-1, *(rng.randrange(max(0, row - 4), row) for row in range(1, num_rows))]
        num_context = len(self.cache)
        self.cache.take(num_rows)
        return Segment(
            [rng.randrange(self.runner.info.vocab_size) for _ in range(num_rows)],
            parents,
            num_context,
            list(self.cache.block_table),
            range(num_rows - 1 if kind == "chunk" else 0, num_rows),
        )


def with_context(runner: ModelRunner, rng: random.Random, length: int) -> Sequence:
    sequence = Sequence(runner, runner.new_cache())
    if length:
        runner.forward([sequence.segment(rng, length, "chunk")])
        sequence.cache.keep(range(length))
    return sequence


def random_parts(rng: random.Random, total: int) -> list[int]:
    parts = []
    while total:
        parts.append(rng.randint(1, min(total, rng.choice([1, 4, 9, 32]))))
        total -= parts[-1]
    return parts


def packed_with_others(
    runner: ModelRunner, rng: random.Random, num_trials: int, lengths: tuple[int, ...] = LENGTHS, num_threads: int = 1
) -> Iterator[str]:
    """The trials in which a segment alone and in company has other logits, in words."""
    pool = [with_context(runner, rng, length) for length in lengths]
    torch.set_num_threads(num_threads)
    try:
        for _ in range(num_trials):
            own, *others = rng.sample(pool, len(pool))
            kind, num_rows = rng.choice(["chain", "tree", "chunk"]), rng.choice([1, 1, 2, 3, 4, 5, 6, 9, 16, 40])
            segment = own.segment(rng, num_rows, kind)
            alone = runner.forward([segment])[0].logits
            total = rng.choice([num_rows + 1, MOST_ROWS, rng.randint(num_rows + 1, MOST_ROWS)])
            sizes = random_parts(rng, total - num_rows)[: len(others)]
            company = [
                other.segment(rng, size, rng.choice(["chain", "tree", "chunk"]))
                for other, size in zip(others, sizes, strict=False)
            ]
            place = rng.randint(0, len(company))
            packed = runner.forward([*company[:place], segment, *company[place:]])[place].logits
            for sequence in (own, *others):
                sequence.cache.keep(())
            if differ(alone, packed):
                worst = float((alone.float() - packed.float()).abs().max())
                yield f"{kind} of {num_rows} after {segment.num_context}, with {sizes} at place {place}: {worst:.1e}"
    finally:
        torch.set_num_threads(1)
        for sequence in pool:
            sequence.cache.release()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, NEAR_BOUNDARIES], ids=["any", "where the number of keys changes"])
def test_a_rows_logits_do_not_depend_on_its_company(runner: ModelRunner, lengths: tuple[int, ...]) -> None:
    assert not list(packed_with_others(runner, random.Random(5), 20, lengths))


@pytest.mark.slow
def test_company_does_not_show_with_two_threads_either(cpu_runner: ModelRunner) -> None:
    """In few trials: two threads on a shared core are slow."""
    assert not list(packed_with_others(cpu_runner, random.Random(2), 3, num_threads=2))


def test_a_pass_may_be_empty(runner: ModelRunner) -> None:
    assert runner.forward([]) == []


def test_a_rows_logits_do_not_depend_on_the_tree_below_it(runner: ModelRunner) -> None:
    """Without this the text can depend on K at a near tie; in bfloat16 those are not rare."""
    rng = random.Random(0)
    for length in (1, 17, 64, 200):
        sequence = with_context(runner, rng, length)
        root = rng.randrange(runner.info.vocab_size)
        rows = []
        for num_rows in (1, 2, 4, 6, 9, 17):
            segment = sequence.segment(rng, num_rows, "tree")
            segment.token_ids[0] = root  # type: ignore[index]
            rows.append(runner.forward([segment])[0].logits[0])
            sequence.cache.keep(())
        sequence.cache.release()
        assert not any(differ(row, rows[0]) for row in rows)


def fed_again(runner: ModelRunner, rng: random.Random, span: tuple[int, int], num_times: int) -> int:
    """How many rows of ``span`` differ when the text is fed again: in other chunks, with other trees and neighbours."""
    first, last = span
    text = [rng.randrange(runner.info.vocab_size) for _ in range(last)]
    neighbours = [with_context(runner, rng, length) for length in (max(0, first - 1), 33, 130)]
    salt = rng.randbytes(8)
    seen: dict[int, Tensor] = {}
    different = num_compared = 0
    for time in range(num_times):
        cache = runner.new_cache(salt)
        if time % 2:
            runner.move(cache.attach(text[:first]))  # of the time before
        while len(cache) < last:
            num_context = len(cache)
            sizes = [1, 2, 5, 9, 17, 40] if num_context >= first else [first - num_context, 40, 200]
            chunk = text[num_context:][: rng.choice(sizes)]
            tree = [rng.randrange(-1, node) if node else -1 for node in range(rng.choice([0, 3, 8]))]
            cache.take(len(chunk) + len(tree))
            segment = Segment(
                [*chunk, *(rng.randrange(runner.info.vocab_size) for _ in tree)],
                [*range(-1, len(chunk) - 1), *(len(chunk) + parent for parent in tree)],
                num_context,
                list(cache.block_table),
                range(len(chunk)),
            )
            others = rng.sample(neighbours, rng.randint(0, 3))
            company = [other.segment(rng, rng.choice([1, 4, 9, 30]), "tree") for other in others]
            place = rng.randint(0, len(company))
            logits = runner.forward([*company[:place], segment, *company[place:]])[place].logits
            for other in others:
                other.cache.keep(())
            cache.keep(range(len(chunk)))
            for row, position in enumerate(range(num_context, len(cache))):
                if position >= first:
                    num_compared += position in seen
                    different += differ(seen.setdefault(position, logits[row]), logits[row])
        cache.remember(text)
        cache.release()
    for neighbour in neighbours:
        neighbour.cache.release()
    assert num_compared == (last - first) * (num_times - 1)
    return different


@pytest.mark.slow
def test_a_rows_logits_do_not_depend_on_how_its_text_was_fed(runner: ModelRunner) -> None:
    assert not {span: n for span in SPANS if (n := fed_again(runner, random.Random(1), span, 3))}


def branches_that_differ(runner: ModelRunner, num_context: int, exact: bool = True) -> int:
    """Rows of a tree with other logits than the same path fed as a chain."""
    rng = random.Random(num_context)
    sequence = with_context(runner, rng, num_context)
    tree = replace(sequence.segment(rng, 12, "tree"), exact=exact)
    assert tree.positions != list(range(num_context, num_context + 12)), "it branches"
    in_tree = runner.forward([tree])[0].logits
    sequence.cache.keep(())
    different = 0
    for row in range(12):
        path = [row]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        chain = sequence.segment(rng, len(path), "chain")
        chain = replace(chain, token_ids=[tree.token_ids[node] for node in path])
        different += differ(in_tree[row], runner.forward([chain])[0].logits[-1])
        sequence.cache.keep(())
    sequence.cache.release()
    return different


@pytest.mark.slow
def test_a_branch_has_the_logits_of_its_text_fed_as_a_chain(runner: ModelRunner) -> None:
    lengths = (1, 10, 61, 123, 252, 509)
    assert not {num_context: n for num_context in lengths if (n := branches_that_differ(runner, num_context))}


# --- planted mistakes: the same checks must find them ------------------------------------------------------------


def test_branches_among_the_keys_of_others_are_found(cpu_runner: ModelRunner) -> None:
    """As a draft feeds them: its proposals decide nothing."""
    assert any(branches_that_differ(cpu_runner, num_context, exact=False) for num_context in (10, 61, 300))


def test_attention_over_any_number_of_rows_is_found(cpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_attention, "ROW_MULTIPLE", 1)
    assert next(packed_with_others(cpu_runner, random.Random(3), 60), None)


def one_member(
    segment: Segment, start: int, positions: list[int], counts: KeyCounts, only_chains: bool
) -> Iterator[Member]:
    """The mistake: keys counted by the last row's slot, for all rows of the segment."""
    rows = range(len(positions))
    yield Member(segment, start, counts.level(segment.num_context + rows[-1]), rows, rows, positions)


def test_keys_counted_by_segment_are_found(cpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "members_of", one_member)
    # Below 128 some kernels give the same bits over 64, 128 and 256 keys.
    assert fed_again(cpu_runner, random.Random(1), (247, 262), 3)


@pytest.mark.slow
def test_numbers_of_keys_that_follow_the_longest_member_are_found(
    cpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_attention, "KEY_COUNTS", KeyCounts((), 64))
    assert next(packed_with_others(cpu_runner, random.Random(3), 60, NEAR_BOUNDARIES), None)
