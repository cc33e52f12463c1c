"""A target on vLLM decides as one on our own engine does, and says what vLLM could not do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.core.errors import InvalidArgument, PassFailed, Preempted
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.sampling.logits_processors import Transforms
from target_service.language_model import LmVerifier
from target_service.self_draft.text_lookup import TextLookup
from target_service.verifier import Decision, Job, Verifier
from target_service.vllm_decisions import TargetSampler
from target_service.vllm_verifier import VllmVerifier
from tests.models.fake_vllm import FakeVllm
from tests.models.table_runner import TableRunner

SAMPLINGS = [
    (SamplingParams(temperature=0.0), Method.COUPLED),
    (SamplingParams(), Method.COUPLED),
    (SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias=((3, 1.0),)), Method.COUPLED),
    (SamplingParams(presence_penalty=0.4, min_tokens=6, end_token_ids=(1,)), Method.COUPLED),
    (SamplingParams(), Method.TOKEN),
    (SamplingParams(top_k=4, frequency_penalty=0.2), Method.BLOCK),
]


def on_vllm(lookup: TextLookup | None = None, **fields: Any) -> tuple[VllmVerifier, FakeVllm]:
    table = TableRunner(vocab_size=12, seed=4)
    fake = FakeVllm(table, TargetSampler(torch.device("cpu")), **fields)
    return VllmVerifier(fake, table.info, lookup), fake  # type: ignore[arg-type]


def spec_of(
    sampling: SamplingParams = SAMPLINGS[1][0], method: Method = Method.COUPLED, prompt: int = 5
) -> SequenceSpec:
    ids = (prompt, *(random.Random(prompt).randrange(12) for _ in range(prompt - 1)))  # no prefix of another
    return SequenceSpec(ids, prompt, sampling, seed=7, method=method)


def job_of(verifier: Verifier, spec: SequenceSpec) -> Job:
    return Job(TargetOpen(spec), verifier.open(spec), spec.token_ids)


def chain_of(rng: random.Random, spec: SequenceSpec) -> TokenTree:
    """Of 4 tokens at most, with the distributions that they were said to be drawn from."""
    tokens = [rng.randrange(12) for _ in range(rng.randrange(5))]
    drawn = [SparseDistribution((token, (token + 1) % 12), (1.0, 0.5)) for token in tokens]
    return TokenTree.chain(tokens, () if spec.keyed_by_token else drawn)


def texts(verifier: Verifier, specs: Sequence[SequenceSpec], num_rounds: int = 20) -> list[list[int]]:
    return rounds(verifier, specs, num_rounds)[0]


def rounds(
    verifier: Verifier, specs: Sequence[SequenceSpec], num_rounds: int = 20, **opened: Any
) -> tuple[list[list[int]], list[Decision]]:
    """Texts and all decisions, with random chains in a random company."""
    rng, decisions = random.Random(1), []
    states = [verifier.open(spec) for spec in specs]
    ids = [list(spec.token_ids) for spec in specs]
    for number in range(num_rounds):
        chosen = [index for index in range(len(specs)) if not number or rng.random() < 0.7]
        trees = [chain_of(rng, specs[index]) if number else TokenTree() for index in chosen]
        jobs = [
            Job(TargetOpen(specs[index], **opened), states[index], tuple(ids[index]), tree)
            for index, tree in zip(chosen, trees, strict=True)
        ]
        for index, tree, decision in zip(chosen, trees, verifier.verify(jobs)[0], strict=True):
            assert isinstance(decision, Decision)
            ids[index] += [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
            decisions.append(decision)
    return ids, decisions


def test_a_target_on_vllm_decides_as_one_on_our_own_engine() -> None:
    specs = [spec_of(sampling, method, 3 + index) for index, (sampling, method) in enumerate(SAMPLINGS)]
    ours = texts(LmVerifier(TableRunner(vocab_size=12, seed=4)), specs)
    verifier, fake = on_vllm()
    assert texts(verifier, specs) == ours
    assert [fake.texts[key] for key in fake.texts] == ours, "vLLM has the text that was committed"


def test_its_logprobs_are_those_of_our_own_engine() -> None:
    """Of the model's own logits, whatever the sampling makes of them."""
    specs = [spec_of(sampling, method, 3 + index) for index, (sampling, method) in enumerate(SAMPLINGS)]
    opened = {"num_logprobs": 3, "num_prompt_logprobs": 2}
    _, ours = rounds(LmVerifier(TableRunner(vocab_size=12, seed=4)), specs, **opened)
    _, on_it = rounds(on_vllm()[0], specs, **opened)
    assert [decision.logprobs for decision in on_it] == [decision.logprobs for decision in ours]
    assert [decision.prompt_logprobs for decision in on_it] == [decision.prompt_logprobs for decision in ours]
    assert on_it[0].logprobs is not None
    assert on_it[0].logprobs.num_top == 3


@pytest.mark.parametrize("kind", ["eagle3", "lookup", "lookup, engine torch"])
def test_what_the_target_drafts_itself_is_verified_in_its_next_pass(kind: str) -> None:
    """It begins and stops at any pass, beside chains from outside and texts that never want it."""
    specs = [spec_of(sampling, method, 3 + index) for index, (sampling, method) in enumerate(SAMPLINGS)]
    alone = [text[:20] for text in texts(on_vllm()[0], specs, 60)]
    rng, verifier = random.Random(2), drafting_by(kind)
    assert (verifier.info.self_draft, verifier.info.fixed_self_draft_nodes) == (kind.split(",")[0], 0), (
        "as many as asked for"
    )
    states, ids = [verifier.open(spec) for spec in specs], [list(spec.token_ids) for spec in specs]
    drafted = accepted = 0
    for _ in range(40):
        jobs = [
            Job(
                TargetOpen(spec, max_self_draft_nodes=4 * (index != 1)),
                states[index],
                tuple(ids[index]),
                chain_of(rng, spec) if index == 1 or rng.random() < 0.2 else TokenTree(),
            )
            for index, spec in enumerate(specs)
        ]
        jobs = [job if job.tree or not job.open.max_self_draft_nodes else with_self_draft(rng, job) for job in jobs]
        for index, (job, decision) in enumerate(zip(jobs, verifier.verify(jobs)[0], strict=True)):
            assert isinstance(decision, Decision)
            tree = decision.self_draft or job.tree
            assert len(decision.self_draft) <= job.self_draft_nodes
            drafted, accepted = drafted + len(decision.self_draft), accepted + len(decision.accepted)
            ids[index] += [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
    # Under the methods that draw again for each round, the text depends on the rounds.
    keyed = [index for index, spec in enumerate(specs) if spec.keyed_by_token]
    assert [ids[index][:20] for index in keyed] == [alone[index] for index in keyed]
    assert accepted > drafted / 3 > 0


def drafting_by(kind: str) -> Verifier[Any]:
    table = TableRunner(vocab_size=12, seed=4)
    if kind == "lookup, engine torch":
        return LmVerifier(table, TextLookup())
    return on_vllm(TextLookup())[0] if kind == "lookup" else on_vllm(proposal=table)[0]


def with_self_draft(rng: random.Random, job: Job[Any]) -> Job[Any]:
    return replace(job, self_draft_nodes=rng.choice((0, 2, 4)))


def test_nothing_is_drafted_where_no_text_ever_wants_it() -> None:
    verifier, fake = on_vllm(proposal=TableRunner(vocab_size=12, seed=4))
    spec = spec_of()
    never, later = (
        job_of(verifier, spec),
        Job(TargetOpen(spec, max_self_draft_nodes=4), verifier.open(spec), spec.token_ids),
    )
    for jobs in ([never], [never, later], [replace(later, self_draft_nodes=9)]):
        verifier.verify([replace(job, ids=tuple(fake.texts.get(job.state.key, job.ids))) for job in jobs])
    assert fake.num_drafts == [None, 0, fake.max_chain]


def test_vllm_is_told_the_adapter_of_each_sequence() -> None:
    verifier, fake = on_vllm()
    jobs = [
        Job(TargetOpen(spec, adapter=name), verifier.open(spec), spec.token_ids)
        for name, spec in (("sql", spec_of()), ("", spec_of()))
    ]
    verifier.verify(jobs)
    assert list(fake.adapters.values()) == ["sql", ""]


def test_of_a_tree_the_likeliest_chain_is_verified_as_long_as_vllm_takes_it() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2))
    assert tree.most_likely_chains() == [0, 2, 4]
    verifier, fake = on_vllm()
    job = job_of(verifier, spec_of())
    _, timings = verifier.verify([job])
    assert timings.rows == 1
    _, timings = verifier.verify([replace(job, ids=tuple(fake.texts["0"]), tree=TokenTree.chain([5] * 9))])
    assert timings.rows == 1 + fake.max_chain


def test_a_long_prompt_takes_several_passes() -> None:
    verifier, _ = on_vllm(prompt_rows=4)
    job = job_of(verifier, spec_of(prompt=10))
    outcomes = [verifier.verify([job])[0][0] for _ in range(3)]
    assert outcomes[:2] == [None, None]
    assert outcomes[2] is not None


@pytest.mark.parametrize(("fault", "error"), [("short_of_memory", Preempted), ("computes_nan", PassFailed)])
def test_what_vllm_cannot_compute_is_an_error_of_that_sequence(fault: str, error: type[Exception]) -> None:
    verifier, fake = on_vllm()
    setattr(fake, fault, True)
    [outcome], _ = verifier.verify([job_of(verifier, spec_of())])
    assert isinstance(outcome, error)


def test_a_closed_sequence_leaves_nothing_in_vllm() -> None:
    verifier, fake = on_vllm()
    used, unused = job_of(verifier, spec_of()), job_of(verifier, spec_of())
    verifier.verify([used])
    verifier.close(used.state)
    verifier.close(unused.state)
    assert not fake.texts


@pytest.mark.parametrize("method", Method)
def test_a_chain_that_vllm_cuts_is_verified_as_far_as_it_goes(method: Method) -> None:
    verifier, fake = on_vllm()
    fake.longest = 1
    job = job_of(verifier, spec_of(method=method))
    verifier.verify([job])
    tree = TokenTree.chain(
        [3, 4, 5], () if method is Method.COUPLED else [SparseDistribution((t,), (1.0,)) for t in (3, 4, 5)]
    )
    [decision], _ = verifier.verify([replace(job, ids=tuple(fake.texts["0"]), tree=tree)])
    assert isinstance(decision, Decision)
    assert len(decision.accepted) <= 1


@pytest.mark.parametrize("error", [RuntimeError("planted"), InvalidArgument([("x", "planted")])], ids=["any", "named"])
@pytest.mark.parametrize("place", ["take_in", "collect", "mask"])
def test_what_raises_in_a_worker_for_one_sequence_ends_that_one(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec_of(*SAMPLINGS[2], 5), spec_of(*SAMPLINGS[3], 6), spec_of(*SAMPLINGS[5], 7)]
    guilty = specs[1].sampling
    alone = texts(on_vllm()[0], [specs[0], specs[2]], 1)
    inner = getattr(Transforms, place)

    def raising(transforms: Transforms, *args: Any, **options: Any) -> Any:
        if transforms.params is guilty and hasattr(transforms, "_mask"):
            raise error
        return inner(transforms, *args, **options)

    monkeypatch.setattr(Transforms, place, raising)
    verifier, _ = on_vllm()
    jobs = [job_of(verifier, spec) for spec in specs]
    first, failed, last = verifier.verify(jobs)[0]
    assert type(failed) is (InvalidArgument if isinstance(error, InvalidArgument) else PassFailed)
    assert [[*spec.token_ids, each.next_token] for spec, each in ((specs[0], first), (specs[2], last))] == alone  # type: ignore[union-attr]
    assert type(verifier.verify(jobs[1:2])[0][0]) is type(failed), "and alone as well"
