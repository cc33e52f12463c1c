"""Law: the logits of a row do not depend on what its segment is packed with, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specdec.backends.torch import gathered_attention
from specdec.core.settings import ModelServiceSettings
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes import rows as packed_rows
from specdec.passes.rows import KeyCounts, Member, Segment
from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from tests.parity.conftest import DEMO

MOST_ROWS = 64
NEAR_BOUNDARIES = (50, 60, 63, 64, 66, 120, 127, 130, 250, 255, 258, 510, 513)


def load(dtype: str, backend: str) -> ModelRunner:
    settings = ModelServiceSettings(model=str(DEMO / "target"), dtype=dtype, backend=backend, kv_slots=8192)
    return load_runner(settings)


@pytest.fixture(scope="module")
def bfloat16_runner() -> ModelRunner:
    return load("bfloat16", "auto")


@pytest.fixture(scope="module")
def bfloat16_runner_by_torch() -> ModelRunner:
    return load("bfloat16", "torch")


@pytest.fixture(params=["float32", "bfloat16", "bfloat16, by torch"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    names = {"float32": "target_runner", "bfloat16": "bfloat16_runner"}
    made: ModelRunner = request.getfixturevalue(names.get(request.param, "bfloat16_runner_by_torch"))
    return made


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


def with_tree_below(
    runner: ModelRunner, rng: random.Random, cache: SequenceCache, num_context: int, chunk: list[int], tree: list[int]
) -> Segment:
    """A chunk of a text, whose logits are wanted, and random tokens below its end."""
    return Segment(
        [*chunk, *(rng.randrange(runner.info.vocab_size) for _ in tree)],
        [*range(-1, len(chunk) - 1), *(len(chunk) + parent for parent in tree)],
        num_context,
        list(cache.block_table),
        range(len(chunk)),
    )


def random_parts(rng: random.Random, total: int) -> list[int]:
    parts = []
    while total:
        parts.append(rng.randint(1, min(total, rng.choice([1, 4, 9, 32]))))
        total -= parts[-1]
    return parts


def check(
    runner: ModelRunner,
    rng: random.Random,
    num_trials: int,
    lengths: tuple[int, ...] = (0, 0, 1, 3, 17, 17, 40, 64, 90, 200),
    one_is_enough: bool = False,
) -> list[str]:
    """Each trial's difference, in words."""
    pool = [with_context(runner, rng, length) for length in lengths]
    different = []
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
        packed: Tensor = runner.forward([*company[:place], segment, *company[place:]])[place].logits
        for sequence in (own, *others):
            sequence.cache.keep(())
        if not torch.equal(alone, packed):
            worst = float((alone.float() - packed.float()).abs().max())
            different.append(
                f"{kind} of {num_rows} after {segment.num_context}, packed with {sizes} at place {place}: {worst:.1e}"
            )
        if different and one_is_enough:
            break
    for sequence in pool:
        sequence.cache.release()
    return different


@pytest.mark.slow
def test_a_rows_logits_do_not_depend_on_its_company(target_runner: ModelRunner, threads: int) -> None:
    num_trials = 100 if threads == 1 else 10  # two threads on a shared core are slow
    different = check(target_runner, random.Random(threads), num_trials)
    print(f"{len(different)} of {num_trials} differ", *different[:20], sep="\n")
    assert not different


@pytest.mark.slow
def test_company_does_not_show_where_the_number_of_keys_changes(target_runner: ModelRunner, threads: int) -> None:
    num_trials = 80 if threads == 1 else 8
    different = check(target_runner, random.Random(threads), num_trials, NEAR_BOUNDARIES)
    print(f"{len(different)} of {num_trials} differ", *different[:20], sep="\n")
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["bfloat16", "bfloat16, by torch"], indirect=True)
def test_company_does_not_show_in_bfloat16_either(runner: ModelRunner) -> None:
    different = check(runner, random.Random(5), 60) + check(runner, random.Random(5), 40, NEAR_BOUNDARIES)
    print(f"{len(different)} of 100 differ", *different[:20], sep="\n")
    assert not different


def test_a_pass_may_be_empty(runner: ModelRunner) -> None:
    assert runner.forward([]) == []


def test_attention_over_any_number_of_rows_is_found(
    target_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_attention, "ROW_MULTIPLE", 1)
    assert check(target_runner, random.Random(3), 60, one_is_enough=True)


def test_a_rows_logits_do_not_depend_on_the_tree_below_it(runner: ModelRunner) -> None:
    """Without this the text can depend on K at a near tie; in bfloat16 those are not rare."""
    rng = random.Random(0)
    worst = 0.0
    for length in (1, 17, 64, 200):
        sequence = with_context(runner, rng, length)
        root = rng.randrange(runner.info.vocab_size)
        rows = []
        for num_rows in (1, 2, 4, 6, 9, 17):
            segment = sequence.segment(rng, num_rows, "tree")
            segment.token_ids[0] = root  # type: ignore[index]
            rows.append(runner.forward([segment])[0].logits[0].float())
            sequence.cache.keep(())
        worst = max([worst, *(float((row - rows[0]).abs().max()) for row in rows)])
        sequence.cache.release()
    print(f"{runner.model.dtype}: logits of one row differ by up to {worst:.1e}")
    assert worst == 0.0


@pytest.mark.slow
def test_a_rows_logits_do_not_depend_on_how_its_text_was_fed(runner: ModelRunner, threads: int) -> None:
    """The same text again and again, in other chunks, beside other neighbours and with other trees below its end."""
    rng = random.Random(7)
    text = [rng.randrange(runner.info.vocab_size) for _ in range(150)]
    neighbours = [with_context(runner, rng, length) for length in (0, 5, 33, 90, 200)]
    seen: dict[int, Tensor] = {}
    different = num_compared = 0
    for _ in range(12 if threads == 1 else 4):
        cache = runner.new_cache()
        while len(cache) < len(text):
            chunk = text[len(cache) :][: rng.choice([1, 1, 2, 3, 5, 9, 17, 40, 100])]
            num_nodes = rng.choice([0, 0, 3, 8])
            tree = [rng.randrange(-1, node) if node else -1 for node in range(num_nodes)]
            num_context = len(cache)
            cache.take(len(chunk) + num_nodes)
            segment = with_tree_below(runner, rng, cache, num_context, chunk, tree)
            others = rng.sample(neighbours, rng.randint(0, 4))
            company = [other.segment(rng, rng.choice([1, 4, 9, 30]), "tree") for other in others]
            place = rng.randint(0, len(company))
            logits = runner.forward([*company[:place], segment, *company[place:]])[place].logits
            for other in others:
                other.cache.keep(())
            cache.keep(range(len(chunk)))
            for row, position in enumerate(range(num_context, len(cache))):
                num_compared += position in seen
                different += not torch.equal(seen.setdefault(position, logits[row]), logits[row])
        cache.release()
    for neighbour in neighbours:
        neighbour.cache.release()
    print(f"{different} of {num_compared} rows differ")
    assert num_compared > 400
    assert not different


SPANS = [(56, 70), (118, 136), (247, 262), (505, 518)]
"""Texts from and to where the number of keys changes."""


def fed_again(runner: ModelRunner, rng: random.Random, span: tuple[int, int], num_times: int) -> tuple[int, int]:
    """How many rows of ``span`` differ when the text is fed again in other chunks, with other trees; of how many."""
    first, last = span
    text = [rng.randrange(runner.info.vocab_size) for _ in range(last)]
    neighbours = [with_context(runner, rng, length) for length in (first - 1, 130)]
    salt = rng.randbytes(8)
    seen: dict[int, Tensor] = {}
    different = num_compared = 0
    for time in range(num_times):
        cache = runner.new_cache(salt)
        if time % 2:
            runner.move(cache.attach(text[:first]))  # of the time before
        while len(cache) < last:
            num_context = len(cache)
            sizes = (
                [1, 2, 5, 9, 17] if num_context >= first else [first - num_context, first + 3 - num_context, 40, 200]
            )
            chunk = text[num_context:][: rng.choice(sizes)]
            tree = [rng.randrange(-1, node) if node else -1 for node in range(rng.choice([0, 3, 8]))]
            cache.take(len(chunk) + len(tree))
            segment = with_tree_below(runner, rng, cache, num_context, chunk, tree)
            other = rng.choice(neighbours)
            logits = runner.forward([other.segment(rng, rng.choice([1, 4, 9]), "tree"), segment])[1].logits
            other.cache.keep(())
            cache.keep(range(len(chunk)))
            for row, position in enumerate(range(num_context, len(cache))):
                if position >= first:
                    num_compared += position in seen
                    different += not torch.equal(seen.setdefault(position, logits[row]), logits[row])
        cache.remember(text)
        cache.release()
    for neighbour in neighbours:
        neighbour.cache.release()
    return different, num_compared


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_chunks_and_prefixes_do_not_show_where_the_number_of_keys_changes(
    runner: ModelRunner, span: tuple[int, int], threads: int
) -> None:
    num_times = 10 if threads == 1 else 3
    different, num_compared = fed_again(runner, random.Random(1), span, num_times)
    assert num_compared > 8 * (num_times - 1)
    assert not different


def branches_that_differ(runner: ModelRunner, num_context: int, exact: bool = True) -> int:
    """Rows of a tree whose bits are not those of their own path, fed as a chain."""
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
        different += not torch.equal(in_tree[row], runner.forward([chain])[0].logits[-1])
        sequence.cache.keep(())
    sequence.cache.release()
    return different


@pytest.mark.slow
def test_a_branch_has_the_bits_of_its_text_fed_as_a_chain(runner: ModelRunner) -> None:
    lengths = (1, 10, 59, 61, 123, 125, 250, 252, 300, 505, 509, 700)
    different = {num_context: branches_that_differ(runner, num_context) for num_context in lengths}
    assert not sum(different.values()), different


def test_branches_that_stand_among_others_keys_are_found(target_runner: ModelRunner) -> None:
    """As a draft feeds them, whose proposals decide nothing."""
    assert any(branches_that_differ(target_runner, num_context, exact=False) for num_context in (10, 61, 300))


def one_member(
    segment: Segment, start: int, positions: list[int], counts: KeyCounts, only_chains: bool
) -> Iterator[Member]:
    """The mistake: keys counted by the last row's slot, for all rows of the segment."""
    rows = range(len(positions))
    yield Member(segment, start, counts.level(segment.num_context + rows[-1]), rows, rows, positions)


def test_keys_counted_by_segment_are_found(target_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "members_of", one_member)
    # Below 128 this machine's kernel gives the same bits over 64, 128 and 256 keys; test_packed_rows.py looks there.
    assert fed_again(target_runner, random.Random(1), (247, 262), 3)[0]


def test_numbers_of_keys_that_follow_the_longest_member_are_found(
    target_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_attention, "KEY_COUNTS", KeyCounts((), 64))
    assert check(target_runner, random.Random(3), 60, NEAR_BOUNDARIES, one_is_enough=True)
