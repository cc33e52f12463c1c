"""Passes that follow a pass in the same call give what passes give that are asked for one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.core.noise import Key
from specdec.core.sequence import Draw, SamplingParams
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import PassRows, Segment
from specdec.runner.model_runner import ModelRunner
from specdec.sampling.distributions import sample_coupled
from specdec.sampling.noise_cache import KeptRows, PassNoise
from tests.models.backends import backend
from tests.specdec.backends.avx512.common_layers import (
    IN_C,
    TAKEN,
    VOCAB,
    model_of,
    random_ids,
    runner_of,
    segment_of,
    threads_for_passes,
)


def asked(cache: SequenceCache, ids: list[int], num_further: int, only_last: bool = False) -> Segment:
    """With room for the further rows."""
    num_context = len(cache)
    cache.take(len(ids) + num_further)
    rows = range(len(ids) - 1, len(ids)) if only_last else range(len(ids))
    return Segment(ids, range(-1, len(ids) - 1), num_context, list(cache.block_table), rows, num_further=num_further)


def drawn(outputs: Sequence[RowOutputs], draws: Sequence[Draw], number: int) -> list[int]:
    """After the last row of each, so many after the first of its draws."""
    tokens = []
    for output, draw in zip(outputs, draws, strict=True):
        logits = output.logits[-1:].float()
        noise = PassNoise([Key(draw.seed, draw.position + number)], VOCAB, logits.device, KeptRows())
        tokens.append(int(sample_coupled(logits, [draw.sampling], noise)))
    return tokens


def one_by_one(
    runner: ModelRunner, caches: list[SequenceCache], num: int, tokens: list[int], draws: Sequence[Draw]
) -> list[list[Any]]:
    """Of each text ``num`` rows more, each of the token that is drawn after the last: token and logits."""
    outputs_of: list[list[Any]] = [[] for _ in caches]
    for number in range(1, num + 1):
        outputs = runner.forward([segment_of(cache, [token]) for cache, token in zip(caches, tokens, strict=True)])
        for item, token, output, cache in zip(outputs_of, tokens, outputs, caches, strict=True):
            item.append((token, output.logits[0]))
            cache.keep([0])
        tokens = drawn(outputs, draws, number)
    return outputs_of


LIKELIEST = Draw(SamplingParams(0.0), 0, 0)


DRAWS = {
    "likeliest": [LIKELIEST] * 3,
    "drawn": [
        Draw(SamplingParams(1.0), 2**63 + 5, 45),
        LIKELIEST,
        Draw(SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01), 7, 17),
    ],
}


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("name", "threads"), [*((name, 2) for name in TAKEN), ("llama", 1)])
def test_further_rows_have_the_bits_of_rows_that_are_fed_one_by_one(name: str, threads: int, draws: list[Draw]) -> None:
    runner = runner_of(model_of(TAKEN[name]))
    rng = random.Random(2)
    texts = [random_ids(rng, length) for length in (45, 3, 17)]  # blocks have 16 slots
    at_once, stepwise = ([runner.new_cache(salt) for _ in texts] for salt in (b"a", b"b"))
    with threads_for_passes(threads):
        segments = [asked(c, ids, 6, only_last=i == 0) for i, (c, ids) in enumerate(zip(at_once, texts, strict=True))]
        outputs = runner.forward([replace(segment, draw=draw) for segment, draw in zip(segments, draws, strict=True)])
        if not outputs[0].further:
            pytest.skip("not on this CPU, or not built")
        first = runner.forward([segment_of(c, ids) for c, ids in zip(stepwise, texts, strict=True)])
        for cache, ids in zip(stepwise, texts, strict=True):
            cache.keep(range(len(ids)))
        expected = one_by_one(runner, stepwise, 6, drawn(first, draws, 0), draws)
        for output, ids, cache, rows in zip(outputs, texts, at_once, expected, strict=True):
            assert list(output.further) == [token for token, _ in rows]
            assert torch.equal(output.logits[-6:], torch.stack([logits for _, logits in rows]))
            assert output.most_likely == output.logits.float().argmax(-1).tolist()
            assert output.sound == [True] * (len(ids) + 6)
            cache.keep(range(len(ids) + 6))
        # And their keys and values are in the pool.
        after, before = (
            runner.forward([segment_of(cache, [1, 2]) for cache in caches]) for caches in (at_once, stepwise)
        )
        for one, other in zip(after, before, strict=True):
            assert torch.equal(one.logits, other.logits)


@IN_C
def test_a_token_beyond_the_vocabulary_is_never_the_likeliest() -> None:
    model = model_of(TAKEN["llama"])
    model.get_output_embeddings().weight.data[VOCAB - 40 :] *= 50
    runner = runner_of(model)
    less = replace(runner.info, vocab_size=VOCAB - 40)
    small = ModelRunner(model, less, 4096, backend())
    [output] = small.forward([asked(small.new_cache(), random_ids(random.Random(1), 9), 5)])
    assert output.logits.shape == (14, VOCAB - 40)
    assert output.most_likely == output.logits.float().argmax(-1).tolist()
    assert list(output.further) == output.most_likely[8:13]


@IN_C
def test_nothing_follows_a_tree_or_an_end_that_is_not_read() -> None:
    runner = runner_of(model_of(TAKEN["llama"]))
    chain = asked(runner.new_cache(), [1, 2, 3], 4)
    tree = replace(asked(runner.new_cache(), [1, 2, 3], 4), parents=[-1, 0, 0])
    unread = replace(asked(runner.new_cache(), [1, 2, 3], 4), logit_rows=range(1))
    for other in (tree, unread):
        assert [output.further for output in runner.forward([chain, other])] == [(), ()]


@IN_C
def test_as_many_rows_follow_as_all_segments_want() -> None:
    runner = runner_of(model_of(TAKEN["llama"]))
    segments = [asked(runner.new_cache(), [1, 2, 3], num) for num in (4, 2, 9)]
    assert PassRows(segments, 16).num_further == 2
    assert [len(output.further) for output in runner.forward(segments)] == [2, 2, 2]


@IN_C
def test_no_row_follows_once_the_pass_is_asked_to_yield() -> None:
    runner = runner_of(model_of(TAKEN["llama"]))
    chain = asked(runner.new_cache(), [1, 2, 3], 4)
    runner.request_yield(True)
    [output] = runner.forward([chain])
    assert (list(output.further), len(output.logits), output.sound) == ([], 3, [True] * 3)
    runner.request_yield(False)
    [output] = runner.forward([chain])
    assert len(output.further) == 4


@IN_C
def test_an_unsound_row_is_told_from_those_that_follow() -> None:
    model = model_of(TAKEN["llama"])
    model.get_input_embeddings().weight.data[50] = float("nan")
    runner = runner_of(model)
    [wrong, right] = runner.forward([asked(runner.new_cache(), ids, 2) for ids in ([1, 50], [1, 2])])
    assert wrong.sound[:2] == [True, False]
    assert right.sound == [True] * 4
