"""Law: under token and block verification the joint law of the output, over several rounds, is the target's.

A text is cut into windows of 2K + 2 tokens. Given the token before it, the law of a window is a product of rows of
the target's table, wherever rounds began and ended in it. So the counts of all windows are compared, by chi-square,
with what is expected given the tokens before them. With as many texts, or fewer, the same check has to find planted
mutants. They are planted under block verification, of which the check knows as little as of token verification.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import Tensor

from draft_service.drafter import DraftSequence
from draft_service.drafters import proposal
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client
from specdec.core import noise
from specdec.core.errors import ReplicaLost, SpecdecError
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import Candidate
from specdec.sampling import draft_draws
from specdec.speculation import verification
from specdec.transport.wire import write_method
from target_service import decision
from target_service.language_model import LmVerifier
from tests.cluster import cluster
from tests.models.table_runner import TableRunner
from tests.parity.chi_square import p_value
from tests.parity.noise_table import NoiseTable
from tests.parity.raw_streams import services
from tests.parity.reference import sample_seed

WINDOWS_PER_TEXT = 10
NUM_TEXTS = 80
NUM_LOST = 180


@dataclass(frozen=True)
class Pair:
    """Target and draft as tables: row t is the law of the token after t."""

    target: list[list[float]]
    draft: list[list[float]]
    num_draft_tokens: int

    @property
    def vocab_size(self) -> int:
        return len(self.target)

    @property
    def window(self) -> int:
        return 2 * self.num_draft_tokens + 2

    @property
    def num_tokens(self) -> int:
        return WINDOWS_PER_TEXT * self.window

    def runner(self, rows: list[list[float]]) -> TableRunner:
        runner = TableRunner(self.vocab_size, order=1, num_slots=1 << 16)
        runner.table = torch.tensor([*rows, rows[0]], dtype=torch.float64).log()
        return runner


# Pairs on which the mutants show: block verification often accepts a token that another uniform rejected.
THREE = Pair(
    [[0.33, 0.19, 0.48], [0.35, 0.18, 0.47], [0.47, 0.27, 0.26]],
    [[0.04, 0.33, 0.63], [0.03, 0.47, 0.50], [0.05, 0.37, 0.58]],
    num_draft_tokens=2,
)
TWO = Pair([[0.33, 0.67], [0.30, 0.70]], [[0.02, 0.98], [0.01, 0.99]], num_draft_tokens=3)
VARIED = Pair(  # every row unlike its neighbours
    [[0.60, 0.30, 0.10], [0.20, 0.50, 0.30], [0.30, 0.20, 0.50]],
    [[0.10, 0.30, 0.60], [0.60, 0.30, 0.10], [0.20, 0.70, 0.10]],
    num_draft_tokens=2,
)


def check(pair: Pair, texts: Sequence[Sequence[int]], first: int) -> float:
    """The p-value of these texts, each the continuation of a prompt that ends with ``first``."""
    ids = np.array([[first, *text[: pair.num_tokens]] for text in texts])
    width, vocab_size = pair.window, pair.vocab_size
    windows = np.concatenate([ids[:, start : start + width + 1] for start in range(0, pair.num_tokens, width)])
    target = np.array(pair.target)
    cells = np.array(list(itertools.product(range(vocab_size), repeat=width)))
    after_first = np.prod([target[cells[:, i - 1], cells[:, i]] for i in range(1, width)], axis=0)
    before = np.bincount(windows[:, 0], minlength=vocab_size)
    expected = sum(before[token] * target[token][cells[:, 0]] * after_first for token in range(vocab_size))
    codes = windows[:, 1:] @ vocab_size ** np.arange(width - 1, -1, -1)
    return p_value(np.bincount(codes, minlength=len(cells)), np.asarray(expected))


async def run(
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    method: Method,
    num_texts: int,
    drafter: Callable[[TableRunner], LanguageModelDrafter] = LanguageModelDrafter,
) -> float:
    """The p-value of texts that both services made over raw streams, all of them on one stream."""
    seeds = range(num_texts)
    reach = pair.num_draft_tokens
    monkeypatch.setattr(noise, "_words", NoiseTable(seeds, pair.num_tokens + 2 * reach + 2, reach))
    specs = [SequenceSpec((0,), 1, SamplingParams(), seed, method) for seed in seeds]
    started = time.perf_counter()
    async with services(LmVerifier(pair.runner(pair.target)), drafter(pair.runner(pair.draft))) as deployment:
        texts = await deployment.generate(specs, pair.num_tokens, reach)
    p = check(pair, texts, 0)
    print(f"{num_texts * WINDOWS_PER_TEXT} windows in {time.perf_counter() - started:.1f} s, p = {p:.3g}")
    return p


def test_the_table_of_noise_is_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [0, 1, 2**64 - 1, 2**40 + 3]
    keys = list(itertools.product(seeds, (0, 1, 9), noise.Domain))

    def numbers() -> list[Tensor]:
        drawn = []
        for seed, base, domain in keys:
            two = [noise.Key(seed, base + 1, base), noise.Key(seed, base + 3, base)]
            drawn += [
                noise.exponentials(two, domain, 3),
                noise.uniforms(two, domain),
                noise.uniforms([], domain),
                noise.exponentials_at(two, torch.tensor([1, 1, 0]), torch.tensor([2, 0, 1]), domain),
            ]
        return drawn

    generated = numbers()
    monkeypatch.setattr(noise, "_words", NoiseTable(seeds, 20, 3))
    assert all(torch.equal(a, b) for a, b in zip(generated, numbers(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "pair"),
    [(Method.TOKEN, VARIED), (Method.TOKEN, TWO), (Method.BLOCK, THREE), (Method.BLOCK, VARIED), (Method.BLOCK, TWO)],
    ids=["token-varied", "token-two", "block-three", "block-varied", "block-two"],
)
async def test_joint_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, pair: Pair, method: Method) -> None:
    assert await run(monkeypatch, pair, method, NUM_TEXTS) > 1e-3


@pytest.mark.slow
async def test_joint_law_is_the_targets_through_the_orchestrator(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, request_seeds, samples = THREE, range(2), NUM_TEXTS // 2
    seeds = [sample_seed(seed, index) for seed in request_seeds for index in range(samples)]
    monkeypatch.setattr(
        noise, "_words", NoiseTable(seeds, pair.num_tokens + 2 * pair.num_draft_tokens + 2, pair.num_draft_tokens)
    )
    verifier = LmVerifier(pair.runner(pair.target))
    drafter = LanguageModelDrafter(pair.runner(pair.draft))
    started = time.perf_counter()
    async with cluster([verifier], [drafter], max_live_sequences=len(seeds)) as deployment:
        groups = await asyncio.gather(
            *(
                deployment.client.generate(
                    token_ids={"token_ids": [0]},
                    max_tokens=pair.num_tokens,
                    n=samples,
                    seed=seed,
                    num_draft_tokens=pair.num_draft_tokens,
                    verification=write_method(Method.BLOCK),
                )
                for seed in request_seeds
            )
        )
        await deployment.settled(30.0)
    texts = [sample.token_ids for group in groups for sample in group]
    p = check(pair, texts, 0)
    print(f"{len(texts) * WINDOWS_PER_TEXT} windows in {time.perf_counter() - started:.1f} s, p = {p:.3g}")
    assert p > 1e-3
    assert sum(sample.finish.speculation.num_accepted_tokens for group in groups for sample in group) > len(texts) * 10


@pytest.mark.slow
async def test_the_law_holds_where_streams_are_lost_that_hold_text_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each text's stream is lost after its third round, when a last "b" is held back: it may begin a stop string. A
    text that our client gives up for that is asked for again, with another seed."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    thirds = TableRunner(3, order=1, sharpness=0.0)
    once = Client._once
    lost: set[int] = set()

    async def losing(self: Client, at: int, request: Any, *rest: Any, **named: Any) -> AsyncIterator[Any]:
        async with aclosing(once(self, at, request, *rest, **named)) as responses:
            async for response in responses:
                if response.round.round == 3 and request.seed < NUM_LOST and request.seed not in lost:
                    lost.add(request.seed)
                    raise ReplicaLost("gone")
                yield response

    monkeypatch.setattr(Client, "_once", losing)
    verifiers, drafters = [LmVerifier(thirds)], [LanguageModelDrafter(thirds)]
    async with cluster(verifiers, drafters, tokenizer=str(tmp_path), max_live_sequences=NUM_LOST) as deployment:
        address = f"127.0.0.1:{deployment.orchestrator.port}"
        async with Client(address, address) as client:

            async def text(seed: int) -> list[int]:
                asked = {"token_ids": {"token_ids": [0]}, "max_tokens": 9, "stop": ["b!"], "num_draft_tokens": 1}
                asked |= {"verification": write_method(Method.TOKEN), "return_rounds": True}
                try:
                    [sample] = await client.generate(**asked, seed=seed)
                except ReplicaLost:
                    [sample] = await client.generate(**asked, seed=seed + NUM_LOST)
                return sample.token_ids

            texts = np.array(await asyncio.gather(*(text(seed) for seed in range(NUM_LOST))))
    assert lost == set(range(NUM_LOST))
    counts = np.stack([np.bincount(column, minlength=3) for column in texts.T])
    assert all(p_value(each, np.full(3, NUM_LOST / 3)) > 1e-4 for each in counts), counts


# --- planted mutants: the same check must find them -------------------------------------------------------------


@pytest.mark.slow
async def test_noise_keyed_by_position_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block verification looks at uniforms beyond the token it stops at; they must not come back."""
    for module, name in (
        (decision, "uniforms"),
        (decision, "exponentials"),
        (proposal, "exponentials_at"),
        (draft_draws, "exponentials_at"),
    ):
        monkeypatch.setattr(module, name, _without_base(getattr(module, name)))
    assert await run(monkeypatch, TWO, Method.BLOCK, 50) < 1e-6


def _without_base(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(keys: Sequence[noise.Key], *rest: Any, **named: Any) -> Tensor:
        return function([key._replace(base=0) for key in keys], *rest, **named)

    return call


@pytest.mark.slow
async def test_target_rows_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = decision.verify_block
    monkeypatch.setattr(
        decision, "verify_block", lambda target_probs, *rest, **named: verify(target_probs.roll(1, 0), *rest, **named)
    )
    assert await run(monkeypatch, THREE, Method.BLOCK, NUM_TEXTS) < 1e-6


@pytest.mark.slow
async def test_draft_rows_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_probs = decision._draft_probs
    monkeypatch.setattr(decision, "_draft_probs", lambda *arguments: draft_probs(*arguments).roll(1, 0))
    assert await run(monkeypatch, VARIED, Method.BLOCK, 40) < 1e-6


@pytest.mark.slow
async def test_a_residual_that_is_the_target_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_residual", lambda joint, target_row, draft_row: target_row)
    assert await run(monkeypatch, THREE, Method.BLOCK, 50) < 1e-6


class ChoosyDrafter(LanguageModelDrafter):
    """Ends its chain before a token that it finds unlikely itself."""

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        return [
            nodes if nodes is None or isinstance(nodes, SpecdecError) else [node for node in nodes if _likely(node)]
            for nodes in super().grow(sequences)
        ]


def _likely(node: Candidate) -> bool:
    assert node.draft_probs is not None
    weights = dict(zip(node.draft_probs.token_ids, node.draft_probs.weights, strict=True))
    return weights[node.token_id] >= 0.5 * sum(weights.values())


@pytest.mark.slow
async def test_a_proposal_cut_by_its_own_content_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run(monkeypatch, THREE, Method.BLOCK, 50, ChoosyDrafter) < 1e-6
