"""Law: a target's predictions are its own tokens at every node of a tree, and what it accepts follows from them."""

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
async def test_predictions_are_the_targets_token_at_every_node(
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
    num_checked = num_older_bases = 0

    def target_token(context: list[int], predicted: int | None = None) -> int:
        """The target's token after ``context``; on other devices than a CPU the predicted one if it nearly is."""
        logits = reference.logits_after([context])[0].numpy()
        # The greedy token wins a race without noise.
        noise = coupled_exponentials(seed, len(context), vocab_size) if temperature else np.ones(vocab_size)
        race = Race(logits, noise, temperature=temperature or 1.0)
        is_near = device != "cpu" and predicted is not None and race.nearly(predicted, near_tie)
        return predicted if is_near else race.winner

    spec = SequenceSpec(tuple(prompt), len(prompt), SamplingParams(temperature), seed)
    async with services(LmVerifier(target_runner)) as deployment:
        [verdict] = (await deployment.target.open([spec], return_predictions=True)).values()
        assert verdict.predictions == (verdict.next_token,) == (target_token(text, verdict.next_token),)
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
            paths: dict[int, list[int]] = {ROOT: []}
            for node, (token, parent) in enumerate(zip(left.token_ids, left.parents, strict=True)):
                paths[node] = [*paths[parent], token]
            predictions = zip(paths.values(), verdict.predictions, strict=True)
            expected = [target_token([*text, *path], predicted) for path, predicted in predictions]
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
