"""Law: of any tree, from any base, a target accepts the path of its own tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from specdec.core.rounds import Round
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import ROOT, TokenTree
from specdec.runner.model_runner import ModelRunner
from target_service.language_model import LmVerifier
from tests.parity.conftest import Reference
from tests.parity.raw_streams import services
from tests.parity.reference import Race, coupled_exponentials


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
async def test_a_target_accepts_the_path_of_its_own_tokens(
    reference: Reference,
    target_runner: ModelRunner,
    prompts: list[list[int]],
    temperature: float,
    device: str,
    near_tie: float,
) -> None:
    rng = random.Random(7)
    vocab_size = target_runner.info.vocab_size
    prompt = prompts[0][:8]
    text, seed, end = list(prompt), 2**64 - 5, len(prompt) + 18
    num_accepted = num_older_bases = 0

    def target_token(context: list[int], committed: int | None = None) -> int:
        """The target's token after ``context``; on other devices than a CPU the committed one if it nearly is."""
        logits = reference.logits_after([context])[0].numpy()
        # The greedy token wins a race without noise.
        noise = coupled_exponentials(seed, len(context), vocab_size) if temperature else np.ones(vocab_size)
        race = Race(logits, noise, temperature=temperature or 1.0)
        is_near = device != "cpu" and committed is not None and race.nearly(committed, near_tie)
        return committed if is_near else race.winner

    spec = SequenceSpec(tuple(prompt), len(prompt), SamplingParams(temperature), seed)
    async with services(LmVerifier(target_runner)) as deployment:
        [verdict] = (await deployment.target.open([spec])).values()
        assert verdict.next_token == target_token(text, verdict.next_token)
        text.append(verdict.next_token)
        number = 0
        while len(text) < end:
            number += 1
            ahead = list(text)
            for _ in range(3):
                ahead.append(target_token(ahead))
            # Every other round names an older base: the text since then is found in the tree, or nothing is verified.
            base = rng.randrange(len(prompt), len(text)) if number % 2 == 0 else len(text)
            base = max(base, len(text) - 3)
            num_older_bases += base < len(text)
            tree = random_tree(rng, ahead[base:], 10, vocab_size)
            start = tree.walk(text[base:])
            left, nodes = tree.below(start) if start is not None else (TokenTree(), ())
            [verdict] = (await deployment.target.verify({0: Round(number, base, tree)})).values()
            assert verdict.base == len(text)
            committed = [*(tree.token_ids[node] for node in verdict.accepted), verdict.next_token]
            accepted, node = [], ROOT
            for token in committed:
                assert token == target_token(text, token)
                text.append(token)
                if (below := left.child(node, token)) is not None:
                    accepted.append(nodes[below])
                    node = below
            assert list(verdict.accepted) == accepted
            num_accepted += len(accepted)
        await deployment.target.close([0])
    assert num_older_bases >= 2
    assert num_accepted >= 2
