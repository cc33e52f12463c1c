"""Law: at temperature 0 the output is, token by token, what transformers' generate gives for the target alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.rounds import Round
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import ROOT, TokenTree
from specdec.runner.model_runner import ModelRunner
from target_service.language_model import LmVerifier
from tests.cluster import Cluster, cluster
from tests.models.scripted import BranchingDrafter, WatchingVerifier
from tests.parity.conftest import Reference
from tests.parity.raw_streams import services
from tests.parity.reference import Race, coupled_exponentials

pytestmark = pytest.mark.slow

LENGTHS = (8, 24, 32, 40)
PER_LENGTH = 12
"""Prompts; those of one length the reference computes side by side without padding."""
NUM_TOKENS = 32
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def continuations(reference: Reference, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """What generate makes of each prompt."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, length in enumerate(LENGTHS):
        chosen = [tuple(prompt[:length]) for prompt in prompts[index * PER_LENGTH :][:PER_LENGTH]]
        found |= zip(chosen, reference.greedy(chosen, NUM_TOKENS), strict=True)
    assert len(found) == len(LENGTHS) * PER_LENGTH
    return found


def diverges(reference: Reference, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> bool:
    """False if they are equal. If not, the first difference has to be a near tie of the target's two best."""
    if list(expected) == list(got):
        return False
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    candidates = [text[at] if at < len(text) else reference.end_token for text in (expected, got)]
    logits = reference.logits_after([[*prompt, *expected[:at]]])[0]
    best = logits.topk(2).values
    gap = float((logits[candidates[0]] - logits[candidates[1]]).abs())
    print(f"divergence at output position {at}: {candidates}, gap {gap:.2e}")
    assert gap < NEAR_TIE, f"{list(got)} instead of {list(expected)}"
    assert float(best[0] - logits[candidates].min()) < NEAR_TIE
    return True


async def generate_all(
    deployment: Cluster,
    cases: Sequence[tuple[tuple[int, ...], int]],
    concurrency: int,
    stop_token_of: Mapping[tuple[int, ...], int] = MappingProxyType({}),
) -> list[list[int]]:
    """The outputs for (prompt, K), so many at a time."""
    turns = asyncio.Semaphore(concurrency)

    async def one(prompt: tuple[int, ...], num_draft_tokens: int) -> list[int]:
        async with turns:
            [sample] = await deployment.client.generate(
                token_ids={"token_ids": prompt},
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                num_draft_tokens=num_draft_tokens,
                stop_token_ids=[stop_token_of[prompt]] if prompt in stop_token_of else [],
            )
            return sample.token_ids

    outputs = await asyncio.gather(*(one(*case) for case in cases))
    await deployment.settled(30.0)
    return outputs


def check(
    reference: Reference,
    continuations: dict[tuple[int, ...], list[int]],
    cases: Sequence[tuple[tuple[int, ...], int]],
    outputs: Sequence[list[int]],
) -> None:
    divergences = sum(
        diverges(reference, prompt, continuations[prompt], output)
        for (prompt, _), output in zip(cases, outputs, strict=True)
    )
    print(f"{len(cases)} combinations, {divergences} divergences at near ties")
    assert divergences <= len(cases) // 50


async def test_chains_of_the_demo_draft_keep_the_greedy_text(
    reference: Reference,
    target_runner: ModelRunner,
    draft_runner: ModelRunner,
    continuations: dict[tuple[int, ...], list[int]],
) -> None:
    # Every K with prompts of several lengths, in an order that mixes them.
    cases = [(prompt, index % 9) for index, prompt in enumerate(continuations)]
    random.Random(1).shuffle(cases)
    assert {num_draft_tokens for _, num_draft_tokens in cases} == set(range(9))
    verifier = WatchingVerifier(target_runner)
    async with cluster([verifier], [LanguageModelDrafter(draft_runner)]) as deployment:
        outputs = await generate_all(deployment, cases, 24)
    print(verifier)
    check(reference, continuations, cases, outputs)
    assert verifier.num_accepted > len(cases)


async def test_branching_trees_keep_the_greedy_text(
    reference: Reference, target_runner: ModelRunner, continuations: dict[tuple[int, ...], list[int]]
) -> None:
    cases = [(prompt, (3, 8, 20)[index % 3]) for index, prompt in enumerate(continuations)]
    verifier = WatchingVerifier(target_runner)
    drafter = BranchingDrafter(target_runner.info, lambda spec: continuations[spec.token_ids[: spec.num_prompt_tokens]])
    async with cluster([verifier], [drafter]) as deployment:
        outputs = await generate_all(deployment, cases, 16)
    print(verifier)
    check(reference, continuations, cases, outputs)
    assert verifier.num_branching_trees > 100
    assert verifier.num_accepted_late_siblings > 100
    assert verifier.num_accepted_deep_late_siblings > 50


async def test_a_stop_token_ends_the_text_wherever_in_a_block_it_falls(
    reference: Reference, target_runner: ModelRunner, continuations: dict[tuple[int, ...], list[int]]
) -> None:
    stops = {prompt: text[(5 + 3 * i) % len(text)] for i, (prompt, text) in enumerate(continuations.items()) if text}
    cut = {prompt: continuations[prompt][: continuations[prompt].index(stop)] for prompt, stop in stops.items()}
    cases = [(prompt, (2, 5, 16)[index % 3]) for index, prompt in enumerate(stops)]
    verifier = WatchingVerifier(target_runner)
    drafter = BranchingDrafter(target_runner.info, lambda spec: continuations[spec.token_ids[: spec.num_prompt_tokens]])
    async with cluster([verifier], [drafter]) as deployment:
        outputs = await generate_all(deployment, cases, 16, stops)
    print(verifier)
    check(reference, cut, cases, outputs)


def random_tree(rng: random.Random, truth: Sequence[int], num_nodes: int, vocab_size: int) -> TokenTree:
    """A tree in which the beginning of ``truth`` may be found, its nodes in any order that the contract allows."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: dict[int, list[int]] = {ROOT: []}
    while len(tokens) < num_nodes:
        parent = rng.randrange(-1, len(tokens))
        depth = len(paths[parent])
        true_parent = paths[parent] == list(truth[:depth]) and depth < len(truth)
        token = truth[depth] if true_parent and rng.random() < 0.6 else rng.choice([*truth, rng.randrange(vocab_size)])
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        paths[len(tokens)] = [*paths[parent], token]
        tokens.append(token)
        parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_predictions_are_the_targets_token_at_every_node(
    reference: Reference,
    target_runner: ModelRunner,
    continuations: dict[tuple[int, ...], list[int]],
    temperature: float,
) -> None:
    rng = random.Random(7)
    vocab_size = target_runner.info.vocab_size
    prompt = sorted(continuations, key=len)[0]
    text, seed, end = list(prompt), 2**64 - 5, len(prompt) + 24
    num_checked = num_older_bases = 0

    def target_token(context: list[int]) -> int:
        logits = reference.logits_after([context])[0]
        if temperature == 0.0:
            return int(logits.argmax())
        noise = coupled_exponentials(seed, len(context), vocab_size)
        return Race(logits.numpy(), noise, temperature=temperature).winner

    spec = SequenceSpec(tuple(prompt), len(prompt), SamplingParams(temperature), seed)
    async with services(LmVerifier(target_runner)) as deployment:
        [verdict] = (await deployment.target.open([spec], return_predictions=True)).values()
        assert verdict.predictions == (verdict.next_token,) == (target_token(text),)
        text.append(verdict.next_token)
        number = 0
        while len(text) < end:
            number += 1
            ahead = list(text)
            for _ in range(3):
                ahead.append(target_token(ahead))
            # Every other round names an older base: what was committed since is found in the tree, or nothing is.
            base = rng.randrange(len(prompt), len(text)) if number % 2 == 0 else len(text)
            base = max(base, len(text) - 3)
            num_older_bases += base < len(text)
            tree = random_tree(rng, ahead[base:], 10, vocab_size)
            start = tree.walk(text[base:])
            left, nodes = tree.below(start) if start is not None else (TokenTree(), ())
            [verdict] = (await deployment.target.verify({0: Round(number, base, tree)})).values()
            assert verdict.base == len(text)
            paths: dict[int, list[int]] = {ROOT: []}
            expected = [target_token(text)]
            for node, (token, parent) in enumerate(zip(left.token_ids, left.parents, strict=True)):
                paths[node] = [*paths[parent], token]
                expected.append(target_token([*text, *paths[node]]))
            assert list(verdict.predictions) == expected
            num_checked += len(expected)
            accepted, node = [], ROOT
            while (below := left.child(node, expected[node + 1])) is not None:
                accepted.append(below)
                node = below
            assert list(verdict.accepted) == [nodes[node] for node in accepted]
            assert verdict.next_token == expected[node + 1]
            text += [*(left.token_ids[node] for node in accepted), verdict.next_token]
        await deployment.target.close([0])
    print(f"{num_checked} predictions checked, {num_older_bases} rounds with an older base")
    assert num_older_bases >= 2
