"""A draft with another vocabulary: the text stays the target's, and shared tokens are proposed as those of its own."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from draft_service.__main__ import DraftSettings
from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.other_vocabulary.drafter import MIN_SHARE, OtherVocabularyDrafter
from draft_service.drafters.other_vocabulary.translation import LOOK_BEHIND, ByteVocabulary, Translation
from specdec.core.rounds import AHEAD, SIBLINGS, ModelInfo
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.settings import parse
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.passes.rows import Segment
from specdec.runner.checkpoint import vocabulary_of
from specdec.runner.model_runner import ModelRunner
from target_service.language_model import LmVerifier
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.draft_service.beside_the_target import equal_texts
from tests.draft_service.vocabularies import (
    TARGET,
    TEXTS,
    between,
    other_tokenizer,
    permuted,
)
from tests.models.backends import BACKENDS
from tests.parity.conftest import load


class PermutedRunner:
    """The bundled draft with the ids of `other_tokenizer`. ``spoils``: it gives random logits."""

    def __init__(self, inner: ModelRunner, spoils: float | None = None) -> None:
        self._inner, self._spoils = inner, spoils
        self._order = torch.tensor(permuted())
        self.grammars = None
        self.num_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def decodes_further(self) -> bool:
        return False

    @property
    def info(self) -> ModelInfo:
        ends = (permuted().index(0),)
        return ModelInfo("permuted", "digest", len(self._order), "other", 2048, eos_token_ids=ends)

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        for segment in segments:
            segment.token_ids[:] = [int(self._order[token]) for token in segment.token_ids]
            self.num_rows += len(segment.token_ids)
        served = []
        for outputs in self._inner.forward(segments):
            logits = outputs.logits[:, self._order]
            if self._spoils is not None:
                logits = torch.full_like(logits, self._spoils) if self._spoils else torch.randn_like(logits)
            sound = torch.ones(len(logits), dtype=torch.bool)
            served.append(PassOutputs(logits, logits, sound, logits.argmax(-1).tolist()).as_one())
        return served


def drafter(translation: Translation, one_by_one: bool, spoils: float | None = None) -> OtherVocabularyDrafter:
    runner: Any = PermutedRunner(load("draft", "float32"), spoils)
    if not one_by_one:
        translation = copy.copy(translation)
        translation.share = MIN_SHARE
    return OtherVocabularyDrafter(runner, translation, vocabulary_of(TARGET))


def of_short_tokens(backend: str) -> OtherVocabularyDrafter:
    """In its vocabulary most texts have more tokens than in the target's."""
    runner: Any = PermutedRunner(load("draft", "float32", backend=backend))
    short = ByteVocabulary(other_tokenizer(num_merges=500), len(permuted()), runner.info.eos_token_ids)
    return OtherVocabularyDrafter(runner, Translation(short, between(other_tokenizer).target), vocabulary_of(TARGET))


# --- proposals --------------------------------------------------------------------------------------------------


def chain(drafter: Any, spec: SequenceSpec, num: int) -> list[int]:
    sequence = DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec))
    for _ in range(100):
        sequence.num_wanted = num - len(sequence.tree)
        [nodes] = drafter.grow([sequence])
        if nodes is not None:
            if not nodes:
                break
            sequence.tree = sequence.tree.extended(nodes)
        if len(sequence.tree) == num:
            break
    drafter.close(sequence.state)
    assert sequence.tree.is_chain
    return list(sequence.tree.token_ids)


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, top_p=0.9)], ids=str)
def test_one_by_one_it_proposes_what_it_would_in_the_targets_vocabulary(
    translation: Translation, target: ByteVocabulary, sampling: SamplingParams
) -> None:
    plain, other = LanguageModelDrafter(load("draft", "float32")), drafter(translation, one_by_one=True)
    for number, text in enumerate(TEXTS[:3]):
        ids = tuple(target.tokens(text.encode() * 4))
        spec = SequenceSpec(ids, len(ids), sampling, number)
        assert chain(other, spec, 6) == chain(plain, spec, 6)
    assert other.cache_use()[0] == 0


def test_by_its_text_it_proposes_the_likeliest_tokens(translation: Translation, target: ByteVocabulary) -> None:
    plain, other = LanguageModelDrafter(load("draft", "float32")), drafter(translation, one_by_one=False)
    ids = tuple(target.tokens(b"def main(self):\n    for index in range("))
    greedy = SequenceSpec(ids, len(ids), SamplingParams(0.0), 1)
    assert chain(other, greedy, 6) == chain(plain, greedy, 6)
    for method in Method:
        spec = SequenceSpec(ids, len(ids), SamplingParams(1.0), 1, method)
        assert chain(other, spec, 6) == chain(plain, greedy, 6), "certain tokens, also where a method corrects"


def test_only_the_latest_rows_are_fed_again(translation: Translation, target: ByteVocabulary) -> None:
    other = drafter(translation, one_by_one=True)
    runner: Any = other._inner._runner
    ids = target.tokens(b"def main(self):\n    return self.value\n" * 30)
    spec = SequenceSpec((), 0, SamplingParams(1.0))
    sequence = DraftSequence(spec, ids[:400], state=other.open(spec))
    assert other.learn([sequence]) == [True]
    for end in range(400, 420):
        sequence.ids = ids[:end]
        runner.num_rows = 0
        assert other.grow([sequence])[0]
        assert runner.num_rows <= 3 * LOOK_BEHIND
    other.close(sequence.state)


def test_a_text_beyond_the_drafts_context_gets_no_proposal(translation: Translation, target: ByteVocabulary) -> None:
    for one_by_one in (False, True):
        other = drafter(translation, one_by_one)
        ids = tuple(target.tokens(b"x = 1\n" * 1000))[:2100]
        for num in (2040, 2047, 2048, 2049, 2100):
            assert bool(chain(other, SequenceSpec(ids[:num], num, SamplingParams(1.0)), 5)) == (num <= 2048)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_text_of_more_tokens_than_the_targets_gets_proposals(name: str, target: ByteVocabulary) -> None:
    """Rows before the target's text have no noise, whatever stands there."""
    other = of_short_tokens(name)
    for text in (b"focus", b"Temporary", b"return"):
        ids = tuple(target.tokens(text))
        assert len(other._translation.draft.tokens(text)) > len(ids)
        assert len(chain(other, SequenceSpec(ids, len(ids), SamplingParams(1.0), 4), 2)) == 2


# --- the text stays the target's -----------------------------------------------------------------------------------

PROMPTS = [
    *(
        "def main(",
        "import ",
        "for i in range(",
        'print("🦙🦙 ',
        "# größe é — 東京\n",
        "naïve = '",
        "\t\t",
        "🦙",
        "é",
        "a",
    ),
    *(
        "class A:\n    def __init__(self",
        "return {",
        "x = [1, 2, 3",
        '"""',
        "<|endoftext|>",
        "\n\n\n",
        "日本語",
        "==",
        "0x",
        "  ",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_by_one", "spoils"), [(False, None), (True, None), (False, float("nan")), (True, 0.0)], ids=str
)
async def test_the_text_is_the_targets(translation: Translation, one_by_one: bool, spoils: float | None) -> None:
    def more(number: int) -> dict[str, Any]:
        return {"presence_penalty": 0.5, "logit_bias": {5: 2.0}} if number % 5 == 0 else {}

    verifier, other = LmVerifier(load("target", "float32")), drafter(translation, one_by_one, spoils)
    async with cluster([verifier], [other], tokenizer=str(TARGET), num_ahead_tokens=8) as served:
        proposed, accepted = await equal_texts(served, PROMPTS, 0.3, more)
        # A random draft has next to nothing accepted.
        assert spoils is not None or accepted > 0.1 * proposed > 10
        await served.settled()


async def short_prompts_are_answered(backend: str, num: int) -> None:
    """So many random prompts of 1 to 8 tokens, all at a temperature, 16 at a time."""
    rng, together = random.Random(1), asyncio.Semaphore(16)
    drawn = [[rng.randrange(1, 4096) for _ in range(rng.randint(1, 8))] for _ in range(num)]
    verifier, other = LmVerifier(load("target", "float32", backend=backend)), of_short_tokens(backend)
    async with cluster([verifier], [other], tokenizer=str(TARGET)) as served:

        async def one(number: int, prompt: list[int]) -> tuple[int, int]:
            asked = {"token_ids": {"token_ids": prompt}, "seed": number, "max_tokens": 8}
            asked["temperature"] = 0.4 + number % 5 / 4
            async with together:
                [sample] = await served.client.generate(**asked, num_draft_tokens=1 + number % 4)
                [alone] = await served.client.generate(**asked, num_draft_tokens=0)
            assert sample.token_ids == alone.token_ids
            stats = sample.finish.speculation
            return stats.num_draft_tokens, stats.num_accepted_tokens

        counts = await asyncio.gather(*(one(*pair) for pair in enumerate(drawn)))
        assert all(proposed for proposed, _ in counts)
        assert sum(accepted for _, accepted in counts)
        await served.settled()


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
async def test_short_prompts_at_temperatures_fail_no_pass(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await short_prompts_are_answered(name, 24)
    # Of the orchestrator's templates, one that shows no tools is warned of.
    records = [record for record in caplog.records if not record.name.startswith("orchestrator.tokenizer")]
    assert not [record for record in records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.slow
async def test_a_grammar_is_the_targets_alone(translation: Translation) -> None:
    """The draft proposes what it forbids as well."""
    runner = load("target", "float32")
    asked = {"text": "x = ", "seed": 1, "max_tokens": 12, "regex": "[0-9]{1,6}"}
    async with cluster(
        [LmVerifier(runner, None, runner.grammars)], [drafter(translation, True)], tokenizer=str(TARGET)
    ) as served:
        texts = [(await served.client.generate(**asked, num_draft_tokens=number))[0].text for number in (0, 3)]
    assert texts[0] == texts[1]
    assert texts[0].isdigit()


@pytest.mark.slow
async def test_methods_that_correct_for_the_draft_are_served(translation: Translation) -> None:
    verifier = LmVerifier(load("target", "float32"))
    async with cluster([verifier], [drafter(translation, True)], tokenizer=str(TARGET)) as served:
        for method in ("VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK"):
            [sample] = await served.client.generate(
                text="for i in range(", seed=1, max_tokens=60, num_draft_tokens=3, verification=method
            )
            assert sample.finish.speculation.num_accepted_tokens


# --- what is refused -----------------------------------------------------------------------------------------------


def test_less_than_half_of_the_vocabulary_is_refused_with_the_share(target: ByteVocabulary) -> None:
    runner: Any = PermutedRunner(load("draft", "float32"))
    vocab = {chr(0x4E00 + place): place for place in range(60)} | {pair: 60 + ord(pair) - 97 for pair in "abcdefgh"}
    other = Translation(ByteVocabulary(Tokenizer(models.BPE(vocab, [])), 68, ()), target)
    with pytest.raises(ValueError, match="the target has 12% of the tokens of permuted, and 50% are needed"):
        OtherVocabularyDrafter(runner, other, vocabulary_of(TARGET))


def test_it_tells_the_targets_vocabulary_and_no_trees(translation: Translation) -> None:
    info, target_info = drafter(translation, True).info, vocabulary_of(TARGET)
    assert (info.vocab_size, info.tokenizer_fingerprint, info.tokens) == (
        4096,
        target_info.tokenizer_fingerprint,
        target_info.tokens,
    )
    assert info.eos_token_ids == (0,)
    assert not {AHEAD, SIBLINGS} & {*info.capabilities}


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--target-tokenizer: .* has no tokenizer\.json"):
        OtherVocabularyDrafter.load(load("draft", "float32"), str(DEMO / "draft"), revision="", target=tmp_path)
    loaded = OtherVocabularyDrafter.load(load("draft", "float32"), str(DEMO / "draft"), revision="", target=TARGET)
    assert loaded.info.tokenizer_fingerprint == vocabulary_of(TARGET).tokenizer_fingerprint


@pytest.mark.parametrize("other", [["--model=m", "--engine=vllm"], ["--ngram=f"]], ids=str)
def test_other_engines_refuse_it_by_name(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(DraftSettings, [*other, "--target-tokenizer=d"], "draft_service")
    assert "--target-tokenizer: " in capsys.readouterr().err
