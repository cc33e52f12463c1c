"""A draft proposes what it would propose afresh: after any history of sequences that open, advance along their trees or
elsewhere, and close, in pools of any size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.proposal import draw, rank
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Advance, Budget, Growth
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.state import SamplingState
from specdec.server.step_loop import Key
from tests.models.table_runner import TableRunner

VOCAB = 11
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.9),
    SamplingParams(0.7, presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(1.0, top_k=3, min_tokens=9),
]


class WholeText(TableRunner):
    """Its logits depend on all of the text, so that no wrong row far above goes unnoticed."""

    def logits_after(self, prefix: Sequence[int]) -> torch.Tensor:
        seed = 0
        for token in prefix:
            seed = (seed * 31 + token + 1) % (2**31 - 1)
        return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


class Client:
    """A sequence in its orchestrator."""

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.ids = list(spec.token_ids)
        self.tree = EMPTY_TREE
        self.number = 0

    def check(self, growth: Growth, runner: TableRunner) -> int:
        """The number of new nodes; each is what the draft proposes there, by its rank among its siblings."""
        if growth.base != len(self.ids) or growth.advance != self.number:
            return 0
        if not self.spec.keyed_by_token:
            tree = EMPTY_TREE
            for node, token in enumerate(growth.tree.token_ids):
                logits = runner.logits_after([*self.ids, *tree.token_ids])[None]
                [drawn] = draw([self._at(self.ids, tree)], [logits], VOCAB)
                assert (drawn.token_ids, drawn.draft_probs) == ((token,), growth.tree.draft_probs[node])
                tree = tree.extended(drawn.below(node - 1, 1))
            return len(tree)
        known, self.tree = len(self.tree), self.tree.merge(growth.tree.under(growth.path))
        for node in range(known, len(self.tree)):
            *above, token = self.tree.path_ids(node)
            text = [*self.ids, *above]
            logits = runner.logits_after(text)[None]
            outputs = PassOutputs(logits, logits, torch.ones(1, dtype=torch.bool)).as_one()
            [[said]] = rank([(self._at(text, EMPTY_TREE), EMPTY_TREE, outputs)], runner.backend)
            assert token in said.token_ids[: max(1, self.tree.parents.count(self.tree.parents[node]))]
            assert not self.tree.confidence or self.tree.confidence[node] in (0, said.confidence), (
                "0: a node asked for alone"
            )
        return len(self.tree) - known

    def _at(self, ids: list[int], tree: TokenTree) -> DraftSequence:
        state = SamplingState(self.spec)
        state.take_in(ids)
        return DraftSequence(self.spec, ids, tree, SimpleNamespace(sampling=state), num_candidates=9)

    def advance(self, chance: random.Random) -> Advance:
        """Some of what was grown comes true, or something else; and perhaps some of the rest is in flight."""
        new: list[int] = []
        if self.tree and chance.random() < 0.6:
            new = list(self.tree.path_ids(chance.randrange(len(self.tree))))
        if not new or chance.random() < 0.4:
            new.append(chance.randrange(VOCAB))
        self.ids += new
        self.number += 1
        keyed = self.spec.keyed_by_token
        self.tree = self.tree.descend(new) if keyed else EMPTY_TREE
        flying, num_ahead = EMPTY_TREE, chance.choice([0, 4, 30]) if keyed else 0
        if num_ahead:
            flying = self.tree.prefix(chance.randrange(5))
            self.tree = flying.merge(self.tree)
        num_nodes = chance.choice([0, 3])
        num_siblings = chance.choice([0, 2]) if keyed and num_nodes else 0
        budget = Budget(num_nodes, chance.choice([4, 9]), num_ahead, num_siblings)
        return Advance(self.number, len(self.ids), tuple(new), flying, budget)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_is_proposed_does_not_depend_on_what_was(seed: int) -> None:
    chance = random.Random(seed)
    size, context = (1, 2, 4, 16)[seed % 4], chance.choice([60, 512])
    runner = WholeText(VOCAB, num_slots=(64, 256, 4096)[seed % 3], block_size=size, context_length=context)
    engine, happened = DraftEngine(LanguageModelDrafter(runner)), Counter[str]()
    clients: dict[Key, Client] = {}
    prompt = [chance.randrange(VOCAB) for _ in range(20)]
    for number in range(150):
        if len(clients) < 4 and chance.random() < 0.3:
            length, key = chance.randrange(1, 20), Key(1, number)
            method, sampling = chance.choice([*[Method.COUPLED] * 3, Method.TOKEN]), chance.choice(SAMPLINGS)
            client = Client(SequenceSpec(tuple(prompt[:length]), length, sampling, number, method))
            engine.open(key, DraftOpen(client.spec, Budget()))
            clients[key] = client
        for _ in range(chance.randrange(1, 6)):
            for key, result in [] if engine.idle else engine.step():
                if isinstance(result, SpecdecError):
                    happened["lost"] += 1
                    clients.pop(key, None)
                elif key in clients:
                    happened["nodes"] += clients[key].check(result, runner)
        for key, client in list(clients.items()):
            if len(client.ids) > context - 20:
                engine.close(key)
                del clients[key]
            elif chance.random() < 0.6:
                engine.submit(key, client.advance(chance))
    for key in clients:
        engine.close(key)
    assert runner.pool.num_used == 0
    assert happened["nodes"] > 100
    assert not happened["lost"] or runner.pool.num_slots < 4096
