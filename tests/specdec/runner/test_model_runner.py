"""A packed pass computes what the plain model computes: sequences, chunks, trees and rollbacks at once."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from specdec.backends.torch.backend import TorchBackend
from specdec.backends.torch.gathered_attention import COPIES, GatheredAttention
from specdec.core.rounds import ModelInfo
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner import model_runner
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend
from tests.specdec.runner.tiny_models import ACCEPTED, CONTEXT, VOCAB, model_of


def runner_of(model: torch.nn.Module, vocab_size: int = VOCAB, num_slots: int = 256) -> ModelRunner:
    return ModelRunner(copy.deepcopy(model), ModelInfo("tiny", "", vocab_size, "", CONTEXT), num_slots, backend())


class Plain:
    """The plain model, one text at a time, with transformers' own attention and masks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = copy.deepcopy(model)
        self._model.set_attn_implementation("eager")
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, text: tuple[int, ...]) -> torch.Tensor:  # [vocab]
        """After the last token of the text."""
        if text not in self._known:
            with torch.inference_mode():
                rows = self._model(torch.tensor([text])).logits[0]
            self._known.update({text[: length + 1]: rows[length] for length in range(len(text))})
        return self._known[text]


def segment_of(cache: SequenceCache, chunk: list[int], tree: list[tuple[int, int]], wanted=None) -> Segment:
    """A chunk that continues the cached text, then a tree of (parent, token) below its last row."""
    rows = len(chunk) + len(tree)
    num_context = len(cache)
    cache.take(rows)
    return Segment(
        token_ids=[*chunk, *(token for _, token in tree)],
        parents=[*range(-1, len(chunk) - 1), *(len(chunk) + parent for parent, _ in tree)],
        num_context=num_context,
        block_table=list(cache.block_table),
        logit_rows=range(rows) if wanted is None else wanted,
    )


def row_texts(text: list[int], segment: Segment) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(segment.token_ids, segment.parents, strict=True):
        texts.append((*(text if parent < 0 else texts[parent]), token))
    return texts


@pytest.mark.parametrize("name", ACCEPTED)
def test_packed_passes_agree_with_the_plain_model(name):
    model = model_of(ACCEPTED[name])
    runner, plain = runner_of(model), Plain(model)
    rng = random.Random(1)
    texts: list[list[int]] = [[], [], []]
    caches = [runner.new_cache() for _ in texts]
    num_rows = num_trees = num_rollbacks = 0
    for _ in range(10):
        chosen = [index for index in range(3) if rng.random() < 0.7 and len(texts[index]) < CONTEXT - 20]
        segments = []
        for index in chosen:
            chunk = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 9]))]
            tree: list[tuple[int, int]] = []
            for node in range(rng.choice([0, 0, 4, 7])):
                edge = (rng.randint(ROOT, node - 1), rng.randrange(VOCAB))
                tree.append(edge)
            num_trees += any(parent != node - 1 for node, (parent, _) in enumerate(tree))
            segments.append(segment_of(caches[index], chunk, tree))
        if not segments:
            continue
        results = runner.forward(segments)
        for index, segment, result in zip(chosen, segments, results, strict=True):
            logits = result.logits
            paths = row_texts(texts[index], segment)
            # Longest first: one plain pass gives every row on its path.
            for row in sorted(range(len(paths)), key=lambda row: -len(paths[row])):
                expected = plain.logits(paths[row])
                torch.testing.assert_close(logits[row], expected, atol=3e-5, rtol=1e-5)
                num_rows += 1
            # Commit a path: some row and its ancestors.
            row, kept = rng.randrange(len(paths)), []
            while row >= 0:
                kept.insert(0, row)
                row = segment.parents[row]
            runner.move(caches[index].keep(kept))
            texts[index].extend(segment.token_ids[row] for row in kept)
            if rng.random() < 0.3:
                length = rng.randrange(len(texts[index]) + 1)
                caches[index].truncate(length)
                del texts[index][length:]
                num_rollbacks += 1
        assert [len(cache) for cache in caches] == [len(text) for text in texts]
    assert num_rows > 100
    assert num_trees > 2
    assert num_rollbacks > 2
    for cache in caches:
        cache.release()
    assert runner.pool.num_used == 0


@pytest.mark.parametrize(("name", "exact"), [*((name, True) for name in ACCEPTED), ("llama", False)])
def test_rows_of_earlier_passes_are_seen_and_not_fed_again(name, exact):
    """A tree that grows by some nodes in every pass; then the text goes on along it, and what is below stays."""
    model = model_of(ACCEPTED[name])
    runner, plain = runner_of(model), Plain(model)
    rng = random.Random(2)
    cache, text, tree = runner.new_cache(), [3], EMPTY_TREE
    runner.forward([segment_of(cache, text, [])])
    cache.keep(range(1))
    num_seen = 0
    for _ in range(20):
        num_kept = len(tree)
        for _ in range(rng.randrange(1, 4)):
            tree = tree.merge(TokenTree((rng.randrange(VOCAB),), (ROOT,)).under(some_path(tree, rng)))
        new = range(num_kept, len(tree))
        if not new:
            continue
        cache.take(len(new))
        segment = Segment(
            tree.token_ids[num_kept:], tree.parents, len(cache), list(cache.block_table), new, exact=exact
        )
        [output] = runner.forward([segment])
        assert len(output.sound) == len(output.logits) == len(new)
        for node, logits in zip(new, output.logits, strict=True):
            path = tree.path(node)
            num_seen += sum(above < num_kept for above in path)
            expected = plain.logits((*text, *(tree.token_ids[above] for above in path)))
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
        if rng.random() < 0.4 and len(text) < CONTEXT - 20:
            path = tree.path(rng.randrange(len(tree)))
            text += [tree.token_ids[node] for node in path]
            tree, behind = tree.below(path[-1])
            runner.move(cache.keep(path, behind))
        else:
            cache.keep((), range(len(tree)))
    assert num_seen > 20
    cache.release()
    assert runner.pool.num_used == 0


def some_path(tree: TokenTree, rng: random.Random) -> list[int]:
    return [tree.token_ids[node] for node in tree.path(rng.randrange(-1, len(tree)))]


@pytest.fixture(scope="module")
def llama():
    return model_of(ACCEPTED["llama"])


def test_only_the_rows_asked_for_come_back_and_only_usable_tokens(llama):
    runner, plain = runner_of(llama, vocab_size=40), Plain(llama)
    text, unread = [5, 6, 7, 8, 9], runner.new_cache()
    first = segment_of(runner.new_cache(), text, [], wanted=[1, 4])
    second = segment_of(unread, [1, 2, 3], [], wanted=[])
    third = segment_of(runner.new_cache(), [3, 4], [], wanted=[0])
    one, none, three = (output.logits for output in runner.forward([first, second, third]))
    assert none.shape == (0, 40)
    assert len(runner.forward([second])[0].logits) == 0, "also if no row of a pass is asked for"
    unread.keep(range(3))
    [after] = runner.forward([segment_of(unread, [4], [])])
    texts = [(5, 6), tuple(text), (3,), (1, 2, 3, 4)]
    for row, of_row in zip([*one, *three, *after.logits], texts, strict=True):
        torch.testing.assert_close(row, plain.logits(of_row)[:40], atol=3e-5, rtol=1e-5)


def test_a_row_has_the_same_bits_alone_and_in_company_and_changes_no_others_cache(llama):
    """A single row is padded. In the second pool there are only the blocks of the two sequences."""
    runner = runner_of(llama)
    [alone] = runner.forward([segment_of(runner.new_cache(), [7, 8, 9, 10], [])])
    packed = runner.forward([segment_of(runner.new_cache(), ids, []) for ids in ([1], [7, 8, 9, 10], [2] * 11)])
    assert torch.equal(packed[1].logits, alone.logits)
    small = runner_of(llama, num_slots=32)
    bystander = small.new_cache()
    small.forward([segment_of(bystander, [7, 8, 9], [])])
    bystander.keep(range(3))
    small.forward([segment_of(small.new_cache(), [0], [])])
    assert torch.equal(small.forward([segment_of(bystander, [10], [])])[0].logits[0], alone.logits[3])


def test_twins_in_different_branches_see_their_own_ancestors_only(llama):
    runner, plain = runner_of(llama), Plain(llama)
    # The same token below two different nodes, and once at the root.
    segment = segment_of(runner.new_cache(), [1, 2], [(-1, 5), (-1, 6), (0, 9), (1, 9), (-1, 9)])
    logits = runner.forward([segment])[0].logits
    for row, text in enumerate([(1,), (1, 2), (1, 2, 5), (1, 2, 6), (1, 2, 5, 9), (1, 2, 6, 9), (1, 2, 9)]):
        torch.testing.assert_close(logits[row], plain.logits(text), atol=3e-5, rtol=1e-5)
    assert not torch.allclose(logits[4], logits[5], atol=1e-2)


def test_the_pool_bounds_what_is_gathered_at_a_time_however_many_share_a_text(llama, monkeypatch):
    """Each sequence reads the text for itself, and specdec.runner.memory counts no more than this bound."""
    passes: list[GatheredAttention] = []
    make = TorchBackend.attention
    monkeypatch.setattr(TorchBackend, "attention", lambda *arguments: passes.append(make(*arguments)) or passes[-1])
    text = list(range(40))

    def logits_of(count: int) -> list[torch.Tensor]:
        runner = runner_of(llama, num_slots=32 + 16 * 16)
        caches = [runner.new_cache() for _ in range(count)]
        for cache in caches:
            runner.move(cache.attach(text))
            runner.forward([segment_of(cache, text[len(cache) :], [])])
            cache.keep(range(len(text) - len(cache)))
            cache.remember(text)
        assert count < 16 or runner.pool.num_used == runner.pool.num_slots
        outputs = runner.forward([segment_of(cache, [number], []) for number, cache in enumerate(caches)])
        [kept] = {scratch.kept.nbytes for scratch in passes[-1].scratch}
        assert 2 * kept <= COPIES * runner.pool.num_slots * runner.bytes_per_slot // llama.config.num_hidden_layers
        return [output.logits for output in outputs]

    for number, logits in enumerate(logits_of(16)):
        assert torch.equal(logits, logits_of(number + 1)[number])


class Clock:
    """The next pass takes ``pass_s``."""

    def __init__(self) -> None:
        self.now = self.pass_s = 0.0

    def perf_counter(self) -> float:
        self.now += self.pass_s  # read before and after
        return self.now


def test_a_runner_measures_its_chunk_by_small_passes_and_by_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(model_runner, "time", clock)
    runner = runner_of(model_of(ACCEPTED["llama"]))
    clock.pass_s = 0.5
    runner.measure_chunk()
    assert runner.chunk.rows == 32
    assert runner.pool.num_used == 0
    cache = runner.new_cache()
    clock.pass_s = 0.25
    runner.forward([segment_of(cache, [1] * 31, [])])
    assert runner.chunk.rows == 32, "this pass was not full"
    runner.forward([segment_of(cache, [1] * 32, [])])
    assert runner.chunk.rows == 128
