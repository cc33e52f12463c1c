"""Law: with vLLM on both sides the text is the one that plain transformers gives, whatever is drafted and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import os
import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from draft_service.drafter import DraftSequence
from draft_service.drafters.vllm_drafter import SAMPLER as DRAFT_SAMPLER
from draft_service.drafters.vllm_drafter import VllmDrafter
from specdec.client import Client
from specdec.core.errors import InvalidArgument, NoReplica, SpecdecError
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from target_service.language_model import LmVerifier
from target_service.vllm_verifier import SAMPLER, VllmVerifier
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.parity.conftest import Reference
from tests.parity.target_alone import SETTINGS, Case, TargetAlone
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def verifier(load, target_model) -> VllmVerifier:
    return VllmVerifier(*load(settings(target_model), SAMPLER))


@pytest.fixture(scope="module")
def drafter(load, draft_model) -> VllmDrafter:
    """Its worker is a process: passes of two models in one process at a time are not vLLM's."""
    apart = settings(draft_model, vllm={"distributed_executor_backend": "mp"})
    return VllmDrafter(*load(apart, DRAFT_SAMPLER))


@pytest.fixture(scope="module")
def alone(reference: Reference, prompts: list[list[int]], near_tie: float) -> TargetAlone:
    cases = [
        Case(tuple(prompts[(3 * setting + i) % len(prompts)][: (8, 24, 40)[(setting + i) % 3]]), 7 * i, setting)
        for setting in range(len(SETTINGS))
        for i in range(2)
    ]
    return TargetAlone(reference, cases, near_tie)


async def cancelled(client: Client, case: Case) -> None:
    """A request of which nobody waits for the end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(case.generate(client, 4), 0.05)


async def check(deployment: Cluster, alone: TargetAlone, num_draft_tokens: Any) -> None:
    rng = random.Random(2)
    together = asyncio.Semaphore(8)

    async def one(case: Case) -> int:
        async with together:
            if rng.random() < 0.2:
                await cancelled(deployment.client, case)
            [sample] = await case.generate(deployment.client, num_draft_tokens(rng))
        return alone.diverges(case, sample.token_ids)

    assert sum(await asyncio.gather(*map(one, alone.texts))) <= 1, "divergences at near ties"
    await deployment.settled()


async def test_the_text_is_that_of_plain_transformers(
    verifier: VllmVerifier, drafter: VllmDrafter, alone: TargetAlone
) -> None:
    for service in (verifier, drafter):
        is_v2 = service._engine._core.vllm_config.use_v2_model_runner
        assert is_v2 == (os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"), "V1 on CPUs, if nothing else is asked for"
    async with cluster([verifier], [drafter]) as deployment:
        await check(deployment, alone, lambda rng: rng.randrange(9))
    for service in (verifier, drafter):
        assert service._engine.num_sequences == 0


@pytest.mark.parametrize("method", ["VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK"])
async def test_the_methods_that_need_distributions_accept_drafts(
    verifier: VllmVerifier, drafter: VllmDrafter, prompts: list[list[int]], method: str
) -> None:
    async with cluster([verifier], [drafter]) as deployment:
        asked = {"token_ids": {"token_ids": prompts[0][:24]}, "max_tokens": 40, "seed": 3, "verification": method}
        [sample], [again] = [await deployment.client.generate(**asked) for _ in range(2)]
        await deployment.settled()
    assert sample.finish.speculation.num_accepted_tokens > 0
    assert sample.token_ids == again.token_ids


@pytest.mark.parametrize(
    "few",
    [{"kv_slots": 768, "vllm": {"max_model_len": 512}}, {"vllm": {"max_num_seqs": 3}}],
    ids=["blocks", "sequences of a pass"],
)
async def test_texts_that_do_not_fit_together_take_turns(
    load, target_model, reference, prompts, near_tie, few: dict[str, Any]
) -> None:
    """A third of what eight texts need: some are preempted, replayed, and are the same."""
    verifier = VllmVerifier(*load(settings(target_model, **few), SAMPLER))
    long = [tuple((prompts[i] * 9)[:150]) for i in range(8)]
    alone = TargetAlone(reference, [Case(prompt, i, i % 4) for i, prompt in enumerate(long)], near_tie)
    async with cluster([verifier]) as deployment:
        await check(deployment, alone, lambda _: 0)


async def test_an_output_follows_its_grammar(verifier: VllmVerifier, drafter: VllmDrafter) -> None:
    async with cluster([verifier], [drafter], tokenizer=str(DEMO / "target")) as deployment:
        asked = {"text": "def f(", "regex": r"[a-c]{2,9}\(\d{3}\)", "temperature": 1.0, "seed": 3}
        texts = [(await deployment.client.generate(**asked, num_draft_tokens=k))[0].text for k in (4, 0)]
        assert re.fullmatch(asked["regex"], texts[0])
        assert texts[0] == texts[1]
        with pytest.raises(InvalidArgument, match="unclosed group"):
            await deployment.client.generate(**asked | {"regex": "("})


async def test_a_text_that_lacks_one_row_has_no_chain_yet(
    verifier: VllmVerifier, drafter: VllmDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM pads it. Prompts of one token join others, and some begin with what is cached up to their last token."""
    rng, together = random.Random(4), asyncio.Semaphore(6)
    long = [rng.randrange(1, 4096) for _ in range(129)]
    methods = ("VERIFICATION_METHOD_COUPLED", "VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK")
    async with cluster([verifier], [drafter], tokenizer=str(DEMO / "target")) as deployment:

        async def one(number: int) -> None:
            prompt = long if number % 4 == 3 else [rng.randrange(1, 4096)]
            asked: dict[str, Any] = {"token_ids": {"token_ids": prompt}, "seed": number, "max_tokens": 12}
            asked |= {"temperature": float(number % 5 > 0), "verification": methods[number % 3]}
            if number % 2:
                asked |= {"regex": r"[a-z]{1,9}"}
            async with together:
                samples = [(await deployment.client.generate(**asked, num_draft_tokens=k))[0] for k in (4, 0)]
            if not number % 3:
                assert samples[0].token_ids == samples[1].token_ids
            assert not number % 2 or re.fullmatch("[a-z]{1,9}", samples[0].text)

        await deployment.client.generate(token_ids={"token_ids": long}, max_tokens=1)
        await asyncio.gather(*map(one, range(48)))
        await deployment.settled()
    # Of the orchestrator's templates, one that shows no tools is warned of.
    records = [record for record in caplog.records if not record.name.startswith("orchestrator.tokenizer")]
    assert not [record for record in records if record.levelname in ("WARNING", "ERROR")]


async def test_cached_tokens_of_a_prompt_are_counted(verifier: VllmVerifier, drafter: VllmDrafter) -> None:
    """Full blocks of 128."""
    prompt = [(7 * i) % 4093 for i in range(300)]
    async with cluster([verifier], [drafter]) as deployment:
        asked = {"token_ids": {"token_ids": prompt}, "max_tokens": 5, "cache_salt": "cached"}
        samples = [(await deployment.client.generate(**asked))[0] for _ in range(2)]
    assert [sample.finish.usage.cached_prompt_tokens for sample in samples] == [0, 256]


def test_a_prompt_is_computed_once_for_all_drafts_of_it(drafter: VllmDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 that hold committed ids alone are shared: what was drafted there and taken back is not found.
    Several tokens of one step are those of a step for each."""
    rng = random.Random(6)
    ids = [rng.randrange(4096) for _ in range(250)]

    def opened(salt: bytes, num_wanted: int) -> DraftSequence[Any]:
        spec = SequenceSpec(tuple(ids), 250, SamplingParams(temperature=0.0), seed=1, cache_salt=salt)
        return DraftSequence(spec, list(ids), state=drafter.open(spec), num_wanted=num_wanted)

    def drafted(sequence: DraftSequence[Any]) -> list[int]:
        """12 tokens, of which 8 are in vLLM's text."""
        sequence.tree = TokenTree()
        while len(sequence.tree) < 12:
            grown = drafter.grow([sequence])[0] or ()
            assert not isinstance(grown, SpecdecError)
            sequence.tree = TokenTree.chain([*sequence.tree.token_ids, *(node.token_id for node in grown)])
        return list(sequence.tree.token_ids)

    first = opened(b"shared", num_wanted=4)
    for _ in range(12):  # the texts go over the end of the second block, with some drafts that are not taken
        draft = drafted(first)
        committed = [*draft[: rng.randrange(3)], rng.randrange(4096)]
        first.ids += committed
        ids += committed
    expected, rows, run = drafted(first), [], drafter._engine.run

    def counted(*args: Any) -> Any:
        outcomes, num_rows = run(*args)
        rows.append(num_rows)
        return outcomes, num_rows

    monkeypatch.setattr(drafter._engine, "run", counted)
    for salt, num_cached, num_wanted in ((b"shared", 256, 4), (b"other", 0, 1)):
        sequence = opened(salt, num_wanted)
        rows.clear()
        assert drafted(sequence) == expected
        assert rows[0] == len(ids) - num_cached
        drafter.close(sequence.state)
    drafter.close(first.state)


async def test_logprobs_are_those_of_engine_torch_with_and_without_drafts(
    verifier: VllmVerifier, drafter: VllmDrafter, target_runner: Any, prompts: list[list[int]]
) -> None:
    """Of the model's own logits, whatever the sampling makes of them; beside a text that has none."""
    ours, lines = LmVerifier(target_runner), (prompts[0] * 9)[:300]
    plain: dict[str, Any] = {"token_ids": {"token_ids": lines}, "max_tokens": 24, "seed": 3}
    sampled = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}}
    for fields in ({"temperature": 0.0, "prompt_logprobs": 2}, sampled):
        answers = []
        for verifiers, drafters, num_draft_tokens in (([verifier], [drafter], 4), ([verifier], [], 0), ([ours], [], 0)):
            async with cluster(verifiers, drafters) as deployment:
                asked = plain | fields | {"logprobs": 3, "num_draft_tokens": num_draft_tokens}
                answer, _ = await asyncio.gather(
                    Answer.received(deployment.client, asked), deployment.client.generate(**plain)
                )
            answers.append(answer)
        assert answers[0].num_accepted_tokens > 0
        assert len(answers[2].output) == 24
        assert len(answers[2].prompt) == (299 if "prompt_logprobs" in fields else 0)
        for answer in answers[:2]:
            answer.assert_as(answers[2])


@dataclass
class Answer:
    """The ids and logprobs of a stream."""

    token_ids: list[int] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)
    num_accepted_tokens: int = 0

    @classmethod
    async def received(cls, client: Client, asked: dict[str, Any]) -> Answer:
        answer = cls()
        async for response in client.stream(**asked):
            if response.HasField("prompt"):
                answer.prompt += positions(response.prompt.logprobs, 2)
            if response.HasField("chunk"):
                answer.token_ids += response.chunk.token_ids
                answer.output += positions(response.chunk.logprobs, 3)
                answer.num_accepted_tokens += response.chunk.finish.speculation.num_accepted_tokens
        return answer

    def assert_as(self, other: Answer) -> None:
        assert self.token_ids == other.token_ids
        for ours, others in ((self.output, other.output), (self.prompt, other.prompt)):
            values, ids = zip(*ours, strict=True) if ours else ((), ())
            other_values, other_ids = zip(*others, strict=True) if others else ((), ())
            assert [*itertools.chain(*values)] == pytest.approx([*itertools.chain(*other_values)], abs=1e-4)
            assert sum(map(operator.ne, ids, other_ids)) <= 1, "near ties"


def positions(logprobs: Any, num_top: int) -> list[tuple[list[float], list[int]]]:
    """Of each position the logprobs, its token's first, and the likeliest ids."""
    ids, values = list(logprobs.top_ids), list(logprobs.top_logprobs)
    return [
        ([logprob, *values[num_top * i : num_top * (i + 1)]], ids[num_top * i : num_top * (i + 1)])
        for i, logprob in enumerate(logprobs.logprobs)
    ]


async def test_what_raises_for_one_text_ends_that_one(load, target_model: str, prompts: list[list[int]]) -> None:
    verifier = VllmVerifier(*load(settings(target_model), "tests.vllm.raising:RaisingSampler"))
    async with cluster([verifier]) as deployment:
        asked = [
            {"token_ids": {"token_ids": prompt[:9]}, "max_tokens": 20, "seed": 2, "presence_penalty": 0.1}
            for prompt in prompts[:4]
        ]
        alone = [(await deployment.client.generate(**each))[0].token_ids for each in asked]
        guilty = deployment.client.generate(token_ids={"token_ids": [5, 6]}, max_tokens=20, logit_bias={7: 1.0})
        *samples, error = await asyncio.gather(
            *(deployment.client.generate(**each) for each in asked), guilty, return_exceptions=True
        )
        assert isinstance(error, NoReplica)
        assert [sample.token_ids for [sample] in samples] == alone
        await deployment.settled()
    assert verifier._engine.num_sequences == 0
