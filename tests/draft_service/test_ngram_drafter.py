"""An n-gram model as a draft: what it counts, what it proposes, and that the text stays the target's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from draft_service.drafters.ngram_drafter import NgramDrafter
from draft_service.drafters.ngram_model import BACKOFF, KEPT, NgramModel, TextCounts, build, scores_after
from draft_service.ngram_build import main
from specdec.cli.main import app
from specdec.core.noise import Domain, Key, exponentials, exponentials_of
from specdec.runner.vocabulary import read_tokenizer, read_vocabulary
from target_service.language_model import LmVerifier
from tests.checkout import DEMO, ROOT
from tests.cluster import cluster
from tests.draft_service.beside_the_target import LENGTH, equal_texts
from tests.parity.conftest import load

TEXTS = st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=4)


def scores_by_hand(texts: list[list[int]], tail: list[int]) -> dict[int, float]:
    scores: dict[int, float] = {}
    factor = 1.0
    for size in range(min(4, len(tail)), 0, -1):
        context = tail[-size:]
        after = Counter(
            text[at + size] for text in texts for at in range(len(text) - size) if text[at : at + size] == context
        )
        if sum(after.values()) >= (2 if size > 2 else 1):
            for token, count in after.items():
                scores.setdefault(token, factor * count / sum(after.values()))
            factor *= BACKOFF
    return scores


@given(TEXTS, st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_scores_are_those_of_stupid_backoff(texts: list[list[int]], tail: list[int]) -> None:
    model = build(texts, 6, "")
    assert scores_after(tail, model, TextCounts(), count=100) == pytest.approx(scores_by_hand(texts, tail))


def test_of_a_context_the_most_frequent_successors_are_kept() -> None:
    texts = [[1, token] for token in range(20) for _ in range(token)]
    tokens, counts, total = build(texts, 20, "").successors([1])
    assert tokens == list(range(19, 19 - KEPT, -1))
    assert counts == tokens
    assert total == sum(range(20))


def test_a_text_of_its_own_counts_at_once_and_most() -> None:
    model, text_counts = build([[1, 2, 3]] * 4, 9, ""), TextCounts()
    text_counts.take_in([1, 2, 7])
    scores = scores_after([1, 2], model, text_counts, count=2)
    assert scores[7] > scores[3] > 0


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.lists(st.integers(0, 999), min_size=1, max_size=9))
def test_noise_without_torch_is_the_same(seed: int, position: int, tokens: list[int]) -> None:
    whole = exponentials([Key(seed, position)], Domain.COUPLED, 1000)[0]
    assert exponentials_of(Key(seed, position), Domain.COUPLED, tokens) == pytest.approx(
        whole[tokens].tolist(), rel=1e-12
    )


def test_a_file_that_is_no_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "b.npz", x=np.array(1))
    for name in ("a.npz", "b.npz", "none.npz"):
        with pytest.raises(ValueError, match="is no n-gram model as `specdec ngram build` writes it"):
            NgramModel.load(tmp_path / name)


@pytest.fixture(scope="module")
def model() -> NgramModel:
    """Of this project's own code."""
    tokenizer = read_tokenizer(DEMO / "target" / "tokenizer.json")
    files = sorted((ROOT / "orchestrator").rglob("*.py"))
    texts = [tokenizer.encode(file.read_text(), add_special_tokens=False).ids for file in files]
    vocabulary = read_vocabulary(DEMO / "target" / "tokenizer.json")
    return build(texts, len(vocabulary), vocabulary.fingerprint)


@pytest.mark.slow
@pytest.mark.parametrize("counted", ["the answers", "random tokens"])
async def test_the_text_is_the_targets_whatever_was_counted(model: NgramModel, counted: str) -> None:
    verifier, rng = LmVerifier(load("target", "float32")), random.Random(1)
    prompts = [f"def {name}({' ' * spaces}" for name in ("main", "read", "write", "load") for spaces in range(3)]
    texts = [[rng.randrange(4096) for _ in range(100_000)]]
    if counted == "the answers":
        async with cluster([verifier], tokenizer=str(DEMO / "target")) as scores:
            asked = {"max_tokens": LENGTH, "num_draft_tokens": 0}
            answers = await asyncio.gather(
                *(
                    scores.client.generate(text=text, seed=number, temperature=float(number % 2), **asked)
                    for number, text in enumerate(prompts)
                )
            )
        texts = [list(answer.token_ids) for [answer] in answers]
    drafter = NgramDrafter(build(texts, 4096, model.fingerprint), counted)
    async with cluster([verifier], [drafter], tokenizer=str(DEMO / "target")) as scores:
        proposed, accepted = await equal_texts(scores, prompts, 0.3)
    assert proposed > 100
    # Of the request's own text some is right in any case.
    assert (accepted > 0.5 * proposed) == (counted == "the answers")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"num_siblings": 2}, {"num_ahead_tokens": 16}], ids=str)
async def test_the_text_is_the_targets(model: NgramModel, settings: dict[str, Any]) -> None:
    verifier = LmVerifier(load("target", "float32"))
    prompts = ["def main(", "import ", "class A:\n    def __init__(self", "for i in range(", "return "] * 2
    async with cluster([verifier], [NgramDrafter(model, "code")], tokenizer=str(DEMO / "target"), **settings) as scores:
        proposed, accepted = await equal_texts(scores, prompts, 0.2)
        assert accepted > 0.05 * proposed > 10


@pytest.mark.slow
async def test_methods_that_correct_for_the_draft_take_its_certain_tokens(model: NgramModel) -> None:
    verifier = LmVerifier(load("target", "float32"))
    async with cluster([verifier], [NgramDrafter(model, "code")], tokenizer=str(DEMO / "target")) as scores:
        for method in ("VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK"):
            [sample] = await scores.client.generate(
                text="for i in range(", seed=1, max_tokens=60, num_draft_tokens=3, verification=method
            )
            assert sample.finish.speculation.num_accepted_tokens


def test_build_writes_a_model_that_loads(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("import os\nimport sys\n" * 4)
    output = tmp_path / "model.npz"
    main([tmp_path / "texts"], DEMO / "target", output)
    drafter = NgramDrafter.load(output)
    assert drafter.info.vocab_size == len(read_vocabulary(DEMO / "target" / "tokenizer.json"))
    assert drafter.info.name == "model"
    shown = CliRunner().invoke(app, ["ngram", "--help"])
    assert "build" in shown.stdout


def spoilt(model: NgramModel, **arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in {**model._arrays, **arrays}.items() if array is not None}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 255
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("spoil", [cut, flipped, lambda file: file.write_bytes(b""), Path.unlink])
def test_a_file_that_is_damaged_is_refused_in_a_sentence(
    model: NgramModel, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    model.save(file := tmp_path / "model.npz")
    spoil(file)
    with pytest.raises(ValueError, match=r"model\.npz is no n-gram model as `specdec ngram build` writes it: "):
        NgramDrafter.load(file)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"keys1": None}, "it has no array keys1"),
        ({"more": np.zeros(1)}, "an unknown array more"),
        ({"format": np.array(2)}, "format is 2, not 1"),
        ({"format": np.array("1")}, "array format is of another kind"),
        ({"vocab_size": np.array([4096])}, "array vocab_size is of another kind"),
        ({"vocab_size": np.array(0)}, "vocabulary"),
        ({"vocab_size": np.array(300)}, "outside of its vocabulary of 300"),
        ({"fingerprint": np.array("\ud800")}, "vocabulary"),
        ({"tokens2": np.zeros(3)}, "array tokens2 is of another kind"),
        ({"counts1": np.zeros((2, 2), np.uint32)}, "array counts1 is of another kind"),
        ({"counts1": np.zeros(1, np.uint32)}, "contexts of 1 tokens do not fit together"),
        ({"starts3": np.zeros(0, np.int64)}, "contexts of 3 tokens do not fit together"),
        ({"keys4": np.zeros(2, np.uint64), "starts4": np.zeros(3, np.int64)}, "contexts of 4 tokens do not fit"),
    ],
)
def test_a_file_that_fails_in_a_pass_is_refused_in_a_sentence(
    model: NgramModel, tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    NgramModel(spoilt(model)).save(file := tmp_path / "model.npz")
    assert NgramModel.load(file).digest == model.digest
    np.savez_compressed(file, **spoilt(model, **arrays))
    with pytest.raises(ValueError, match=words):
        NgramDrafter.load(file)


def test_contexts_out_of_order_are_refused(model: NgramModel, tmp_path: Path) -> None:
    np.savez(file := tmp_path / "model.npz", **spoilt(model, keys1=model._arrays["keys1"][::-1]))
    with pytest.raises(ValueError, match="contexts of 1 tokens are not in order"):
        NgramDrafter.load(file)


def test_a_small_file_does_not_take_the_memory_of_a_large_one(model: NgramModel, tmp_path: Path) -> None:
    np.savez_compressed(file := tmp_path / "model.npz", **spoilt(model, tokens1=np.zeros(1 << 26, np.uint32)))
    with pytest.raises(ValueError, match=r"would take \d+ bytes of memory"):
        NgramDrafter.load(file)


def test_one_array_is_no_model(tmp_path: Path) -> None:
    np.save(file := tmp_path / "model.npy", np.zeros(3))
    with pytest.raises(ValueError, match="is no n-gram model"):
        NgramDrafter.load(file)
