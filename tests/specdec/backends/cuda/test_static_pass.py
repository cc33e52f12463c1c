"""Static passes give the torch backend's logits, whatever their memory held, and draw what is drawn elsewhere."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.backends.common_layer import CommonLayer
from specdec.backends.cuda.backend import CudaBackend
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Draw, SamplingParams
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend
from tests.models.poison import poison_static_memory
from tests.specdec.backends.avx512.common_layers import (
    CONTEXT,
    POISON,
    SHAPE,
    TAKEN,
    VOCAB,
    model_of,
    outputs_of,
    random_ids,
    segment_of,
)

NUM_FURTHER = 6
DRAWS = {
    "greedy": [Draw(SamplingParams(0.0), 0, 0)] * 3,
    "drawn": [
        Draw(SamplingParams(1.0), 2**63 + 5, 45),
        Draw(SamplingParams(0.0), 0, 3),
        Draw(SamplingParams(0.8), 7, 17),
    ],
}
FILTERED = Draw(SamplingParams(0.8, top_k=3), 7, 17)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_static_memory(monkeypatch)
    torch.set_num_threads(1)


def runner_of(model: Any, name: str = "cuda") -> ModelRunner:
    return ModelRunner(copy.deepcopy(model), ModelInfo("tiny", "", VOCAB, "", CONTEXT), 4096, backend(name))


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(TAKEN["llama"], torch.float32)


@pytest.fixture
def runner(model: Any) -> ModelRunner:
    return runner_of(model)


def drawn_after(outputs: RowOutputs, draw: Draw, first_position: int) -> list[int]:
    """The tokens of all logit rows, by the torch backend."""
    draws = [draw._replace(position=first_position + row) for row in range(len(outputs.logits))]
    return backend("torch").draw(outputs.logits, draws).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_logits_are_those_of_the_torch_backend(name: str, dtype: torch.dtype) -> None:
    model = model_of(TAKEN[name], dtype)
    (fed, logits), (also_fed, expected) = outputs_of(runner_of(model)), outputs_of(runner_of(model, "torch"))
    assert fed == also_fed
    spread = expected.float().std()
    assert (logits.float() - expected.float()).square().mean().sqrt() < spread * (
        1e-5 if dtype is torch.float32 else 0.03
    )


def test_a_pass_has_the_same_bits_whatever_ran_before(runner: ModelRunner) -> None:
    """In random order, and with caches that do not change, so that each pass can run again."""
    rng = random.Random(1)
    passes = []
    for num_rows in (1, 2, 15, 16, 17, 40, 130, 200):
        caches = [runner.new_cache() for _ in range(rng.randint(1, 3))]
        segments = [segment_of(cache, random_ids(rng, 1 + num_rows // len(caches))) for cache in caches]
        tree = [rng.randrange(max(-1, row - 3), row) if row else -1 for row in range(9)]
        passes.append([*segments, segment_of(runner.new_cache(), random_ids(rng, 9), tree)])
    seen: dict[int, list[torch.Tensor]] = {}
    for number in rng.choices(range(len(passes)), k=30):
        logits = [outputs.logits for outputs in runner.forward(passes[number])]
        assert all(map(torch.equal, seen.setdefault(number, logits), logits))


def test_a_rows_bits_do_not_depend_on_others_within_a_size_class(runner: ModelRunner) -> None:
    rng = random.Random(2)
    own, others = runner.new_cache(), [runner.new_cache() for _ in range(4)]
    segment = segment_of(own, random_ids(rng, 3), [-1, 0, 0])
    [alone] = runner.forward([segment])
    for _ in range(5):
        company = [segment_of(cache, random_ids(rng, rng.randint(1, 3))) for cache in others]
        place = rng.randint(0, 4)
        outputs = runner.forward([*company[:place], segment, *company[place:]])[place]
        assert torch.equal(outputs.logits, alone.logits)
        for cache in others:
            cache.keep(())


def test_a_pass_draws_after_each_row_with_a_draw(runner: ModelRunner) -> None:
    rng = random.Random(3)
    texts = [random_ids(rng, length) for length in (5, 1, 4, 2, 3)]
    segments = [segment_of(runner.new_cache(), ids) for ids in texts]
    draws = [*DRAWS["drawn"], FILTERED, None]
    outputs = runner.forward([replace(segment, draw=draw) for segment, draw in zip(segments, draws, strict=True)])
    for output, draw in zip(outputs[:3], draws[:3], strict=True):
        assert draw is not None
        assert output.drawn == drawn_after(output, draw, 1)
    assert [output.drawn for output in outputs[3:]] == [None, None]


def with_room(cache: SequenceCache, ids: list[int], draw: Draw | None = None, num: int = NUM_FURTHER) -> Segment:
    """A chain that further rows may follow."""
    num_context = len(cache)
    cache.take(len(ids) + num)
    segment = Segment.chain(ids, num_context, list(cache.block_table), logit_rows=range(len(ids)))
    return replace(segment, num_further=num, draw=draw)


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_further_rows_have_the_bits_of_rows_that_are_fed_one_by_one(runner: ModelRunner, draws: list[Draw]) -> None:
    rng = random.Random(4)
    texts = [random_ids(rng, length) for length in (45, 3, 17)]  # blocks have 16 slots
    at_once, stepwise = ([runner.new_cache(salt) for _ in texts] for salt in (b"a", b"b"))
    outputs = runner.forward([with_room(*pair) for pair in zip(at_once, texts, draws, strict=True)])
    first = runner.forward([segment_of(cache, ids) for cache, ids in zip(stepwise, texts, strict=True)])
    for output, before, draw, cache, ids in zip(outputs, first, draws, stepwise, texts, strict=True):
        cache.keep(range(len(ids)))
        token = drawn_after(before, draw, 1)[-1]
        assert len(output.further) == NUM_FURTHER
        for number, further in enumerate(output.further):
            assert further == token
            [fed] = runner.forward([segment_of(cache, [token])])
            cache.keep([0])
            assert torch.equal(output.logits[len(ids) + number], fed.logits[0])
            [token] = drawn_after(fed, draw, len(ids) + 1 + number)
            assert output.drawn is not None
            assert output.drawn[len(ids) + number] == token
        assert output.sound == [True] * (len(ids) + NUM_FURTHER)


def test_no_row_follows_a_tree_a_filter_an_unread_end_or_a_request_to_yield(runner: ModelRunner) -> None:
    chain = with_room(runner.new_cache(), [1, 2, 3])
    others = [replace(chain, parents=[-1, 0, 0]), replace(chain, draw=FILTERED), replace(chain, logit_rows=range(1))]
    for other in others:
        assert [list(output.further) for output in runner.forward([chain, other])] == [[], []]
    runner.request_yield(True)
    [output] = runner.forward([chain])
    assert (list(output.further), len(output.logits)) == ([], 3)
    runner.request_yield(False)
    assert len(runner.forward([chain])[0].further) == NUM_FURTHER


def test_an_unsound_row_is_told_from_others(model: Any) -> None:
    model = copy.deepcopy(model)
    model.get_input_embeddings().weight.data[POISON] = float("nan")
    runner = runner_of(model)
    wrong, right = runner.forward([with_room(runner.new_cache(), ids, num=2) for ids in ([1, POISON], [1, 2])])
    assert wrong.sound[:2] == [True, False]
    assert right.sound == [True] * 4
    prefill = replace(segment_of(runner.new_cache(), [1, POISON, 2]), logit_rows=())
    assert runner.forward([prefill])[0].sound == [True, False, True]


def test_layers_of_the_common_kind_are_taken_and_others_left(model: Any) -> None:
    def num_taken(runner: ModelRunner) -> int:
        return sum(type(module) is CommonLayer for module in runner.model.modules())

    assert num_taken(runner_of(model)) == SHAPE["num_hidden_layers"]
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.act_fn = torch.nn.Tanh()  # any activation is taken
    other.model.layers[2].self_attn.register_forward_pre_hook(
        lambda _, __, given: ((), given | {"hidden_states": 2 * given["hidden_states"]}), with_kwargs=True
    )
    runner = runner_of(other)
    assert num_taken(runner) == SHAPE["num_hidden_layers"] - 1
    assert CudaBackend(backend("torch")).report(runner.model)["common_layers"] == SHAPE["num_hidden_layers"] - 1
    logits, expected = (outputs_of(each)[1] for each in (runner, runner_of(other, "torch")))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_a_pass_may_be_empty(runner: ModelRunner) -> None:
    assert runner.forward([]) == []
