"""Law: what is decided of a sequence, and proposed for it, does not depend on the other sequences of the pass."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.proposal import draw, rank
from specdec.backends.base import Backend
from specdec.backends.torch.backend import TorchBackend
from specdec.core.errors import InvalidArgument
from specdec.core.limits import MAX_CHAIN_NODES
from specdec.core.noise import Key
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, SparseDistribution, TokenTree
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.sampling.state import SamplingState
from target_service.decision import Case, decide
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job
from tests.models.automaton import Automaton
from tests.models.backends import CPU
from tests.models.backends import backend as backend_named
from tests.models.lying import noise_of, winner
from tests.models.table_runner import TableRunner

VOCAB = 300
BACKEND = backend_named("auto")
PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.6, 20),
    SamplingParams(0.9, 0, 0.8),
    SamplingParams(1.2, 0, 1.0, 0.05),
    SamplingParams(0.0, repetition_penalty=1.5, min_tokens=3, end_token_ids=tuple(range(20))),
    SamplingParams(1.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias=((7, 3.0), (9, -100.0))),
]


@dataclass
class Memory:
    sampling: SamplingState


@dataclass
class Example:
    """A sequence, what is to be verified of it, and the logits."""

    spec: SequenceSpec
    ids: list[int]
    tree: TokenTree
    logits: torch.Tensor  # [1 + nodes, vocab]

    def case(self) -> Case:
        return Case(SamplingState(self.spec), self.ids, self.tree)

    def drafting(self) -> DraftSequence:
        return DraftSequence(self.spec, self.ids, self.tree, Memory(SamplingState(self.spec)))


def given(logits: torch.Tensor, with_likeliest: bool = False) -> RowOutputs:
    likeliest = logits.float().argmax(-1).tolist() if with_likeliest else None
    return PassOutputs(logits, logits, torch.ones(len(logits), dtype=torch.bool), likeliest).as_one()


def propose(sequences: list[DraftSequence], outputs: list[RowOutputs], backend: Backend = BACKEND) -> list[Any]:
    """What a draft proposes after the last row of each."""
    keyed = [i for i, each in enumerate(sequences) if each.spec.keyed_by_token]
    drawn = [i for i in range(len(sequences)) if i not in keyed]
    found: dict[int, Any] = dict(
        zip(keyed, rank([(sequences[i], sequences[i].tree, outputs[i]) for i in keyed], backend), strict=True)
    )
    found |= zip(
        drawn,
        draw([sequences[i] for i in drawn], [outputs[i].logits for i in drawn], backend.logits_per_call),
        strict=True,
    )
    return [found[i] for i in range(len(sequences))]


def drawn(rng: random.Random, spec: SequenceSpec, tokens: list[int]) -> TokenTree:
    """A chain, each token drawn from a distribution of which the one in ``tokens`` is likely, or certain."""
    base = len(spec.token_ids)
    probs: list[SparseDistribution | None] = []
    for node, token in enumerate(list(tokens)):
        probs.append(None)
        if rng.random() < 0.8:
            ids = [token, *rng.sample([v for v in range(VOCAB) if v != token], 7)]
            distribution = SparseDistribution(tuple(ids), (1.0, *(2.0 ** -rng.randrange(8) for _ in ids[1:])))
            noise = noise_of(Key(spec.seed, base + node, base), VOCAB)
            tokens[node], probs[node] = winner(distribution, noise), distribution
    return TokenTree.chain(tokens, probs)


def case(rng: random.Random, dtype: torch.dtype) -> Example:
    method = rng.choice(list(Method))
    sampling = rng.choice(PARAMS)
    num_nodes = rng.choice([0, 0, 1, 2, 5, 9])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = (rng.choice([1.0, 3.0]) * torch.randn(1 + num_nodes, VOCAB, generator=generator)).to(dtype)
    likely = logits.argsort(-1, descending=True)
    parents: list[int] = []
    tokens: list[int] = []
    spec = SequenceSpec(tuple(rng.randrange(VOCAB) for _ in range(4)), 2, sampling, rng.getrandbits(64), method)
    for node in range(num_nodes):
        parent = rng.randrange(-1, node) if spec.keyed_by_token else node - 1
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        tokens.append(next(int(v) for v in likely[parent + 1][rng.randrange(2) :] if int(v) not in taken))
        parents.append(parent)
    tree = TokenTree(tuple(tokens), tuple(parents)) if spec.keyed_by_token else drawn(rng, spec, tokens)
    return Example(spec, list(spec.token_ids), tree, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_decisions_and_proposals_do_not_depend_on_the_company(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    cases = [case(rng, dtype) for _ in range(64)]
    alone = [decide([c.case()], [given(c.logits)], BACKEND)[0] for c in cases]
    proposed = [propose([c.drafting()], [given(c.logits[-1:])])[0] for c in cases]
    for num_jobs in (1, 2, 3, 7, 16, 64):
        order = rng.sample(range(64), num_jobs)
        outputs = [given(cases[i].logits, rng.random() < 0.5) for i in order]
        assert decide([cases[i].case() for i in order], outputs, BACKEND) == [alone[i] for i in order]
        outputs = [given(cases[i].logits[-1:], rng.random() < 0.5) for i in order]
        nodes = propose([cases[i].drafting() for i in order], outputs)
        assert nodes == [proposed[i] for i in order]
    kinds = {(c.spec.method, c.spec.sampling.greedy) for c in cases}
    assert len(kinds) == 6
    assert sum(len(decision.accepted) for decision in alone) > 10
    assert any(len(c.tree) and not c.tree.is_chain for c in cases)


@pytest.mark.parametrize("method", list(Method))
def test_a_pass_is_decided_in_calls_of_so_many_logits_and_in_one_if_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """64 samples with 64 draft tokens each, at a vocabulary of 152k, took 10 GB in float64."""
    rng = random.Random(2)
    spec = SequenceSpec((5, 6), 2, SamplingParams(1.0), 11, method)
    num_nodes = MAX_CHAIN_NODES
    logits = torch.randn(1 + num_nodes, VOCAB, generator=torch.Generator().manual_seed(4))
    tokens = [rng.randrange(VOCAB) for _ in range(num_nodes)]
    tree = TokenTree.chain(tokens) if spec.keyed_by_token else drawn(rng, spec, tokens)
    cases = [Case(SamplingState(spec), [5, 6], tree) for _ in range(64)]
    sizes: list[int] = []
    for name in ("target_service.decision.probabilities", "specdec.backends.torch.draw.sample_coupled"):
        _record(monkeypatch, name, sizes)
    by_torch = backend_named("torch")
    [alone] = decide(cases[:1], [given(logits)], by_torch)
    assert decide(cases, [given(logits)] * 64, by_torch) == [alone] * 64
    assert max(sizes) <= by_torch.logits_per_call < 64 * logits.numel()
    sizes.clear()
    decide(cases, [given(logits)] * 64, TorchBackend(CPU, logits_per_call=64 * logits.numel()))
    assert sizes == [64 * logits.numel()]


def test_a_device_with_gigabytes_to_spare_decides_a_large_pass_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 sequences with four draft tokens each, at a vocabulary of 152,000."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a stub")
    assert TorchBackend(torch.device("cuda:0")).logits_per_call >= 32 * 5 * 152_000


def _record(monkeypatch: pytest.MonkeyPatch, name: str, sizes: list[int]) -> None:
    """Add to ``sizes`` how many numbers each call of this function is given."""
    function = resolve_name(name)

    def recorded(rows: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(rows.numel())
        return function(rows, *rest, **options)

    monkeypatch.setattr(name, recorded)


def test_a_draft_proposes_for_a_few_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    cases = [case(rng, torch.float32) for _ in range(16)]
    drafting = [c.drafting() for c in cases]
    for sequence in drafting:
        sequence.num_candidates = 3
    outputs = [given(c.logits[-1:]) for c in cases]
    proposed = propose(drafting, outputs)
    sizes: list[int] = []
    for name in ("draft_service.drafters.proposal.probabilities", "specdec.backends.torch.draw.most_likely_draws"):
        _record(monkeypatch, name, sizes)
    assert propose(drafting, outputs, TorchBackend(CPU, logits_per_call=2 * VOCAB)) == proposed
    assert max(sizes) <= 2 * VOCAB


def test_no_jobs_are_legal() -> None:
    assert decide([], [], BACKEND) == []
    assert propose([], []) == []


@pytest.mark.parametrize("params", PARAMS[1:])
def test_siblings_and_later_rounds_share_the_noise_of_a_position(params: SamplingParams) -> None:
    """What the target draws at a node is what it draws there as a root, in a later round, on another replica."""
    generator = torch.Generator().manual_seed(5)
    tree = TokenTree((3, 4, 5, 6), (-1, -1, 0, 1))
    logits = 3.0 * torch.randn(5, VOCAB, generator=generator)
    spec = SequenceSpec((1, 2), 1, params, 77)
    sampling = SamplingState(spec)
    [decision] = decide([Case(sampling, [1, 2], tree)], [given(logits)], BACKEND)
    for node, path in enumerate([[], [3], [4], [3, 5], [4, 6]]):
        for state in (SamplingState(spec), sampling if node == 4 else SamplingState(spec)):
            state.take_in([1, 2, *path])
            [alone] = decide([Case(state, [1, 2, *path], EMPTY_TREE)], [given(logits[node : node + 1])], BACKEND)
            assert alone.next_token == decision.predictions[node]


# "a b* c" over and over, with the tokens 10, 20 and 30; 40 stands for either a or c.
GRAMMAR = [{10: 1, 40: 1}, {20: 1, 30: 0, 40: 0}]


def written(spec: SequenceSpec, num_tokens: int, num_draft_tokens: int, rng: random.Random) -> list[int]:
    """Rounds with random trees (chains for token and block), whose tokens the grammar often forbids."""
    sampling = SamplingState(spec, Automaton(GRAMMAR))
    ids = list(spec.token_ids)
    num_accepted = 0
    while len(ids) < len(spec.token_ids) + num_tokens:
        parents, tokens = [], []
        for node in range(num_draft_tokens):
            parent = rng.randrange(-1, node) if spec.keyed_by_token else node - 1
            taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
            tokens.append(rng.choice([token for token in (10, 20, 30, 40, 50, 60) if token not in taken]))
            parents.append(parent)
        tree = TokenTree(tuple(tokens), tuple(parents))
        texts = [list(ids)]
        for token, parent in zip(tokens, parents, strict=True):
            texts.append([*texts[parent + 1], token])
        logits = torch.stack([logits_after(text) for text in texts])
        assert sampling.take_in(ids) is None
        [decision] = decide([Case(sampling, ids, tree)], [given(logits)], BACKEND)
        num_accepted += len(decision.accepted)
        ids += [*(tokens[node] for node in decision.accepted), decision.next_token]
    assert num_accepted > 0 or not num_draft_tokens
    return ids[len(spec.token_ids) :][:num_tokens]


def logits_after(text: list[int]) -> torch.Tensor:  # [vocab]
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(sum(text) + 1000 * len(text)))


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[1], PARAMS[6]])
def test_a_grammar_is_followed_whatever_is_proposed(method: Method, params: SamplingParams) -> None:
    rng = random.Random(3)
    spec = SequenceSpec((5, 6), 2, params, 11, method)
    texts = [written(spec, 60, num_draft_tokens, rng) for num_draft_tokens in (0, 3, 6)]
    assert all(Automaton(GRAMMAR).accepts(text) for text in texts)
    if spec.keyed_by_token:
        assert texts[0] == texts[1] == texts[2]
    # A replay takes the grammar up where the text is.
    half = SequenceSpec((5, 6, *texts[0][:30]), 2, params, 11, method)
    rest = written(half, 30, 4, rng)
    assert Automaton(GRAMMAR).accepts([*texts[0][:30], *rest])
    if spec.keyed_by_token:
        assert rest == texts[0][30:]


def test_a_draft_follows_the_grammar_too() -> None:
    spec = SequenceSpec((5, 6), 2, SamplingParams(), 11)
    drafting = DraftSequence(spec, [5, 6], EMPTY_TREE, Memory(SamplingState(spec, Automaton(GRAMMAR))))
    for _ in range(12):
        logits = logits_after([*drafting.ids, *drafting.tree.token_ids])[None]
        [[guesses]] = propose([drafting], [given(logits)])
        [token] = guesses.token_ids
        drafting.tree = TokenTree.chain([*drafting.tree.token_ids, token])
    assert Automaton(GRAMMAR).accepts(drafting.tree.token_ids)


def test_a_text_that_leaves_the_grammar_ends_alone() -> None:
    """Committed tokens come from a peer, to a draft at least: they must not fail the pass for its neighbours."""
    spec = SequenceSpec((5, 6), 2, SamplingParams(0.0))
    verifier, drafter = LmVerifier(TableRunner(seed=3)), LanguageModelDrafter(TableRunner(seed=3))
    for kind in (verifier, drafter):
        memories = [kind.open(dataclasses.replace(spec, cache_salt=salt)) for salt in (b"a", b"b", b"c")]
        memories[1].sampling = SamplingState(spec, Automaton([{3: 0}]))
        outcome: Any
        if isinstance(kind, LmVerifier):
            outcome, timings = kind.verify([Job(TargetOpen(spec), state, [5, 6, 4]) for state in memories])
            assert timings.sequences == 2
        else:
            outcome = kind.grow([DraftSequence(spec, [5, 6, 4], EMPTY_TREE, memory) for memory in memories])
        assert isinstance(outcome[1], InvalidArgument)
        assert outcome[0] == outcome[2] != outcome[1]
        assert isinstance(outcome[0], Decision | list)
