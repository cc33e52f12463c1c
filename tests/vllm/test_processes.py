"""vLLM's workers are processes of the service: several share a model, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers

from draft_service.drafters.vllm_drafter import SAMPLER as DRAFT_SAMPLER
from specdec.cli.processes import free_ports, healthy, is_serving, paired, service
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.server.liveness import RESTART_STATUS
from target_service.verifier import Decision, Job, Verifier
from target_service.vllm_verifier import SAMPLER, VllmVerifier
from testing.patience import eventually
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def text(verifier: Verifier, length: int = 24) -> list[int]:
    spec = SequenceSpec(tuple(range(5, 60)), 55, SamplingParams(), seed=3)
    state, ids = verifier.open(spec), list(spec.token_ids)
    while len(ids) < 55 + length:
        chain = TokenTree.chain([7, 8]) if len(ids) % 2 and len(ids) > 55 else TokenTree()
        [decision], _ = verifier.verify([Job(TargetOpen(spec), state, tuple(ids), chain)])
        assert isinstance(decision, Decision)
        ids += [*(chain.token_ids[node] for node in decision.accepted), decision.next_token]
    verifier.close(state)
    return ids[: 55 + length]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A model that two workers can share."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=1024)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_two_workers_that_share_each_layer_give_the_same_text(load, tiny, monkeypatch) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    both = VllmVerifier(*load(settings(tiny, threads=2, vllm={"tensor_parallel_size": 2}), SAMPLER))
    one = VllmVerifier(*load(settings(tiny), SAMPLER))
    assert text(both) == text(one)
    assert both.info.model_digest != one.info.model_digest, "sums in another order"


def test_what_vllm_refuses_is_refused_in_its_words(load, target_model) -> None:
    with pytest.raises(ValueError, match=r"target: .*attention heads.* must be divisible by tensor parallel size"):
        load(settings(target_model, vllm={"tensor_parallel_size": 2}), SAMPLER)


def test_any_other_argument_of_vllm_is_passed_on_and_is_part_of_the_digest(load, tiny) -> None:
    """A prompt of 55 ids in passes of at most 32 rows."""
    plain = VllmVerifier(*load(settings(tiny), SAMPLER))
    args = {"max_num_batched_tokens": 32}
    cut = VllmVerifier(*load(settings(tiny, vllm={"args": args}), SAMPLER))
    spec = SequenceSpec(tuple(range(5, 60)), 55, SamplingParams(), seed=3)
    open_ = TargetOpen(spec, num_logprobs=1, num_prompt_logprobs=2)
    decisions: list[list[Decision | SpecdecError | None]] = []
    for verifier in (plain, cut):
        job = Job(open_, verifier.open(spec), spec.token_ids)
        decisions.append([])
        while not decisions[-1] or decisions[-1][-1] is None:
            decisions[-1] += verifier.verify([job])[0]
        verifier.close(job.state)
    [whole], [*parts, joined] = decisions
    assert parts == [None]
    assert isinstance(whole, Decision)
    assert isinstance(joined, Decision)
    assert whole.prompt_logprobs is not None
    assert joined.prompt_logprobs is not None
    assert whole.next_token == joined.next_token
    assert joined.prompt_logprobs.logprobs == pytest.approx(whole.prompt_logprobs.logprobs, abs=1e-4)
    assert joined.prompt_logprobs.top_ids == whole.prompt_logprobs.top_ids
    assert plain.info.model_digest != cut.info.model_digest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scheduler_cls", "engine vllm sets scheduler_cls by itself"),
        ("data_parallel_size", "engine vllm sets data_parallel_size by itself"),
        ("max_num_seqs", "max_num_seqs is a setting of its own .--vllm.max-num-seqs."),
        ("max_num_seqz", "unexpected keyword argument 'max_num_seqz'"),
    ],
)
def test_an_argument_that_is_not_the_operators_is_refused(load, tiny, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(settings(tiny, vllm={"args": {name: 1}}), SAMPLER)


async def test_two_nodes_share_a_model_the_first_serves_and_the_other_ends_with_it(tiny, tmp_path) -> None:
    ports = free_ports(4)
    shared = ["--engine=vllm", "--vllm.distributed-executor-backend=mp", "--vllm.nnodes=2", f"--model={tiny}"]
    shared += ["--vllm.tensor-parallel-size=2", f"--vllm.master-port={ports[3]}", "--vllm.max-num-seqs=8"]
    shared += ["--dtype=float32", "--kv-slots=4096", "--threads=2", "--memory-fraction=0.1"]
    async with (
        service("target_service", ports[0], shared, tmp_path / "first") as first,
        service("target_service", ports[1], [*shared, "--vllm.node-rank=1"], tmp_path / "other") as other,
        service("orchestrator", ports[2], [f"--target={first.address}"], tmp_path) as orchestrator,
    ):
        await healthy(first)
        await paired(orchestrator)
        async with Client(orchestrator.address) as client:
            [sample] = await client.generate(token_ids={"token_ids": [1, 2, 3]}, max_tokens=20, seed=1)
        assert len(sample.token_ids) == 20
        assert not await is_serving(other.address), "requests go to the first node alone"
        family = children(first.process.pid) + children(other.process.pid)
        assert family
        first.process.kill()
        assert await asyncio.wait_for(other.process.wait(), 60) == RESTART_STATUS
        await eventually(lambda: not any(map(lives, family)))


async def test_a_service_whose_worker_dies_ends_and_leaves_no_process(target_model, tmp_path) -> None:
    flags = ["--engine=vllm", "--dtype=float32", "--kv-slots=8192", f"--model={target_model}"]
    flags += ["--vllm.distributed-executor-backend=mp"]
    async with service("target_service", free_ports(1)[0], flags, tmp_path) as running:
        await healthy(running)
        family = children(running.process.pid)
        assert family
        os.kill(family[-1], signal.SIGKILL)
        assert await asyncio.wait_for(running.process.wait(), 60) == RESTART_STATUS
        await eventually(lambda: not any(map(lives, family)))


async def test_one_cpu_has_its_worker_in_the_process_of_the_service(target_model, tmp_path) -> None:
    ports = free_ports(2)
    flags = ["--engine=vllm", "--dtype=float32", "--kv-slots=8192", f"--model={target_model}", "--threads=1"]
    async with (
        service("target_service", ports[0], flags, tmp_path) as running,
        service("orchestrator", ports[1], [f"--target={running.address}"], tmp_path) as orchestrator,
    ):
        await healthy(running)
        await paired(orchestrator)
        async with Client(orchestrator.address) as client:
            [sample] = await client.generate(token_ids={"token_ids": [1, 2, 3]}, max_tokens=20, ignore_eos=True)
        assert len(sample.token_ids) == 20, "with fewer threads than cores"
        assert not children(running.process.pid)


@pytest.mark.parametrize("sampler", [SAMPLER, DRAFT_SAMPLER], ids=["target", "draft"])
def test_a_model_with_a_recurrent_state_is_refused(load, tmp_path, sampler: str) -> None:
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    mixed = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    config = transformers.JambaConfig(**shape, **mixed, num_experts=1)
    transformers.JambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="engine vllm serves no model with a recurrent state"):
        load(settings(str(tmp_path)), sampler)


def children(pid: int) -> list[int]:
    """Of a process, and theirs. vLLM's workers come last."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    own = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own + [grandchild for child in own for grandchild in children(child)]


def lives(pid: int) -> bool:
    """Not so if there is a zombie, whose command line is empty."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("world_size", "share"), [(1, 0.25), (2, 0.125)])
def test_the_cache_is_a_share_of_the_free_memory(
    world_size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of all memory less what the process holds, which may be more than that share."""
    from vllm.utils import cpu_resource_utils

    from specdec.vllm.loading import cache_bytes

    node = cpu_resource_utils.MemoryNodeInfo(total_memory=10 * 2**30, available_memory=2 * 2**30)
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda number: node)
    made = settings("any", memory_fraction=0.25, vllm={"tensor_parallel_size": world_size})
    assert cache_bytes(made) == share * 2 * 2**30
