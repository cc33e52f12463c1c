"""From a directory to a runner, or to a sentence for the operator."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from specdec.backends import choice
from specdec.backends.torch.onednn_linear import PackedLinear
from specdec.core.settings import ModelServiceSettings
from specdec.runner import cgroup, loading, memory
from specdec.runner.checkpoint import Checkpoint
from specdec.runner.loading import load_runner
from tests.models.backends import backend

CONTEXT = 40


@pytest.fixture
def directory(tmp_path) -> Path:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, max_position_embeddings=CONTEXT)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def load(directory: Path, **settings):
    return load_runner(ModelServiceSettings(model=str(directory), **settings))


def found(directory, dtype):
    here = backend()
    return Checkpoint.find(str(directory), dtype, here.name, here.fingerprint).info


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_has_the_dtype_and_the_pool_asked_for(directory, dtype):
    runner = load(directory, dtype=dtype, kv_slots=64)
    assert runner.model.dtype == getattr(torch, dtype)
    assert runner.info == found(directory, dtype)
    assert dtype != "float32" or isinstance(runner.model.lm_head, PackedLinear)
    assert (runner.pool.num_slots, runner.pool.num_used) == (64, 0)
    # Keys and values of two heads of 8 in two layers.
    assert runner.bytes_per_slot == 2 * 2 * 2 * 8 * runner.model.dtype.itemsize


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_dtype_auto_is_bfloat16_where_the_cpu_computes_in_it(directory, monkeypatch, native, dtype):
    monkeypatch.setattr(choice, "has_native_bfloat16", lambda: native)
    runner = load(directory, kv_slots=64)
    assert runner.model.dtype == getattr(torch, dtype)
    assert runner.info.dtype == dtype
    assert runner.info.model_digest == found(directory, dtype).model_digest


def test_without_a_size_the_pool_takes_what_memory_allows_but_no_more_than_can_be_used(directory, monkeypatch):
    runner = load(directory, dtype="float32", max_sequences=10)
    assert runner.pool.num_slots == 10 * CONTEXT
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 << 20)
    assert 16 <= load(directory, dtype="float32", max_sequences=10_000).pool.num_slots < 10_000 * CONTEXT


def test_a_pool_takes_memory_only_where_it_is_used(directory):
    runner = load(directory, dtype="float32", kv_slots=8_000_000)  # 2 GB
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    cache = runner.new_cache()
    cache.take(16)
    cache.release()
    again = load(directory, dtype="float32", kv_slots=8_000_000)
    grown = int(Path("/proc/self/statm").read_text().split()[1]) - resident
    assert again.pool.num_slots == 8_000_000
    assert grown * 4096 < 1 << 30


def test_the_memory_is_reported_and_a_pool_smaller_than_the_context_warned_of(directory, caplog):
    caplog.set_level(logging.INFO, loading.__name__)
    load(directory, dtype="float32", kv_slots=160)
    [report] = [record for record in caplog.records if record.msg == "memory"]
    assert (report.kv_tokens, report.kv_pool) == (160, "40 KiB")
    num_weights = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    num_frequencies = 2 * 4  # of rotary positions, in the model but not in the file
    assert report.weights == f"{(num_weights + num_frequencies) * 4 / 1024:.4g} KiB"
    assert "smaller than the model's context" not in caplog.text
    load(directory, kv_slots=16)
    assert "smaller than the model's context" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(kv_slots=10**9), r"--kv-slots 1000000000 needs \d.* GiB, .* would fit"),
        (dict(memory_fraction=1e-9), r"no memory is left for the KV cache: .*--memory-fraction 1e-09"),
        (dict(device="cuda:7"), r"there is no device cuda:7"),
        (dict(device="abacus"), r"there is no device abacus"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_in_words(directory, settings, words):
    with pytest.raises(ValueError, match=words):
        load(directory, **settings)


def without_a_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def cut_off(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def not_causal(directory: Path) -> None:
    config = hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, n_positions=CONTEXT)
    hf.T5ForConditionalGeneration(config).save_pretrained(directory)


def with_its_state_elsewhere(directory: Path) -> None:
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=8, num_heads=4, head_dim=8, n_groups=1)
    config = hf.Mamba2Config(**sizes)
    config.max_position_embeddings = CONTEXT
    hf.Mamba2ForCausalLM(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_weight, r"lacks 1 weights, such as model.layers.1.mlp.up_proj.weight"),
        (cut_off, "cannot be loaded"),
        (not_causal, r"cannot be loaded: Unrecognized configuration class .*T5Config"),
        (with_its_state_elsewhere, "whole state in keys and values"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_in_words(directory, change, words):
    change(directory)
    with pytest.raises(ValueError, match=words):
        load(directory)


def test_threads_are_those_asked_for_or_what_a_container_may_use(directory, monkeypatch):
    load(directory, threads=2)
    assert torch.get_num_threads() == 2
    load(directory)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.5)
    load(directory)
    assert torch.get_num_threads() == 1


def test_loading_leaves_no_helpers_that_compete_with_those_of_the_model_thread(directory, monkeypatch):
    """OpenMP keeps helpers for every thread that computed, as long as it lives: with two threads on two cores a pass
    took twice as long."""
    threads = []
    find = Checkpoint.find

    def recorded(*arguments: str) -> Checkpoint:
        threads.append(threading.current_thread())
        return find(*arguments)

    monkeypatch.setattr(Checkpoint, "find", recorded)
    load(directory)
    [thread] = threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


SLOW = """
import threading, time
from specdec.server import model_server
from specdec.core.settings import EngineSettings

def build():
    loading = threading.Thread(target=time.sleep, args=[100])
    loading.start()
    print("loading", flush=True)
    loading.join()

model_server.run(EngineSettings(), "draft", build)
"""


@pytest.mark.slow
def test_a_service_that_loads_its_model_ends_at_a_signal():
    """It once waited until everything was loaded, which takes minutes, and was killed before."""
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            service = stack.enter_context(subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE))
            stack.callback(service.kill)
            assert service.stdout.readline() == b"loading\n"
            service.send_signal(number)
            assert service.wait(10) == 0
