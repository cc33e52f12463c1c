"""One sequence's exception fails one sequence of a draft, wherever it is raised: the trees of the others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.drafters import ngram_drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.ngram_drafter import NgramDrafter
from draft_service.drafters.ngram_model import TextCounts, build
from draft_service.drafters.vllm_drafter import VllmDrafter
from draft_service.drafters.vllm_sampler import DraftSampler
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import InvalidArgument, PassFailed, SpecdecError
from specdec.core.rounds import Advance, Budget
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.sampling.logits_processors import Transforms
from specdec.sampling.state import SamplingState
from specdec.server.step_loop import Key
from tests.models.fake_vllm import FakeVllm
from tests.models.table_runner import TableRunner

VOCAB = 12
GUILTY, SEED = Key(1, 0), 666
"""The sequence under which something raises, and its seed, by which it is known."""


def language_model() -> Drafter:
    return LanguageModelDrafter(TableRunner(vocab_size=VOCAB, seed=4))  # type: ignore[arg-type]


def on_vllm() -> Drafter:
    table = TableRunner(vocab_size=VOCAB, seed=4)
    return VllmDrafter(FakeVllm(table, DraftSampler(torch.device("cpu"))), table.info)  # type: ignore[arg-type]


def counting() -> Drafter:
    return NgramDrafter(build([[1, 2, 3, 1, 2, 3, 4, 5, 1, 2, 3]], VOCAB, ""), "ngram")


def of_guilty(transforms: Transforms, *_: Any, **options: Any) -> bool:
    return transforms.params.top_k == SEED


def of_guilty_text(runner: TableRunner, segments: Any) -> bool:
    firsts = [runner._slot(segment, 0) for segment in segments if segment.num_context]
    return GUILTY.sequence in [runner._token_of_slot[slot] for slot in firsts]


SAMPLING = [(Transforms, name, of_guilty) for name in ("take_in", "collect", "mask")]
SAMPLING += [(SamplingState, "draw", lambda state, _: state.spec.seed == SEED)]
PLACES = [
    *((make, *place) for make in (language_model, on_vllm) for place in SAMPLING),
    (language_model, TableRunner, "forward", of_guilty_text),
    (counting, TextCounts, "take_in", lambda text_counts, ids: GUILTY.sequence in ids),
    (counting, ngram_drafter, "scores_after", lambda tail, *_, count: GUILTY.sequence in tail),
]
"""A drafter, and a function that raises for one of its sequences."""


def grown(drafter: Drafter, keys: list[int], ahead: int, methods: list[Method]) -> dict[Key, list[Any]]:
    """What each sequence answers to four advances; nothing after an error."""
    engine, outcomes = DraftEngine(drafter), {Key(1, key): [] for key in keys}
    bases = dict.fromkeys(outcomes, 3)
    for key in outcomes:
        seed = SEED if key == GUILTY else key.sequence
        params = SamplingParams(0.8, top_k=SEED if key == GUILTY else 0, presence_penalty=0.3)
        spec = SequenceSpec((key.sequence, 2, 3), 3, params, seed, methods[key.sequence])
        engine.open(key, DraftOpen(spec, Budget()))
    for number in range(1, 5):
        for key, base in bases.items():
            more = ahead if methods[key.sequence] is Method.COUPLED else 0
            engine.submit(key, Advance(number, base + 1, (number,), budget=Budget(2, 8, more)))
            bases[key] = base + 1
        while not engine.idle:
            for key, result in engine.step():
                outcomes[key].append(result)
                if isinstance(result, SpecdecError):
                    del bases[key]
    for key in outcomes:
        engine.close(key)
    assert drafter.cache_use()[0] == 0
    return outcomes


@pytest.mark.parametrize("error", [RuntimeError("planted"), InvalidArgument([("x", "planted")])], ids=["any", "named"])
@pytest.mark.parametrize(("make", "owner", "name", "is_guilty"), PLACES)
@pytest.mark.parametrize("ahead", [0, 6])
def test_what_raises_for_one_sequence_ends_that_one(
    make: Callable[[], Drafter],
    owner: Any,
    name: str,
    is_guilty: Callable[..., bool],
    ahead: int,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = [Method.COUPLED, Method.COUPLED, Method.COUPLED, Method.COUPLED if ahead else Method.BLOCK]
    alone = grown(make(), [1, 2, 3], ahead, methods)
    inner, drafter, is_open = getattr(owner, name), make(), []

    def raising(*args: Any, **options: Any) -> Any:
        if is_open and is_guilty(*args, **options):
            raise error
        return inner(*args, **options)

    grow = drafter.grow
    monkeypatch.setattr(owner, name, raising)
    monkeypatch.setattr(drafter, "grow", lambda sequences: [is_open.append(True), grow(sequences)][1])
    outcomes = grown(drafter, [0, 1, 2, 3], ahead, methods)
    assert type(outcomes.pop(GUILTY)[-1]) is (InvalidArgument if isinstance(error, InvalidArgument) else PassFailed)
    assert {key: trees(item) for key, item in outcomes.items()} == {
        key: trees(expected) for key, expected in alone.items()
    }


def trees(growths: list[Any]) -> list[Any]:
    """The nodes of each advance."""
    nodes: dict[int, set[Any]] = {}
    for growth in growths:
        tree = growth.tree.under(growth.path)
        paths = {tree.path_ids(end) for end in range(len(tree))}
        nodes.setdefault(growth.advance, set()).update(paths)
    return sorted(nodes.items())
