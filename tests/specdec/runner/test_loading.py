"""From a directory to a runner, or to a sentence for the operator."""

from __future__ import annotations

import json
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


def find_checkpoint(directory, dtype):
    here = backend()
    return Checkpoint.find(str(directory), dtype, here.name, here.fingerprint).info


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_has_the_dtype_and_the_pool_asked_for(directory, dtype):
    runner = load(directory, dtype=dtype, kv_slots=64)
    assert runner.model.dtype == getattr(torch, dtype)
    assert runner.info == find_checkpoint(directory, dtype)
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
    assert runner.info.model_digest == find_checkpoint(directory, dtype).model_digest


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


def of_a_page(directory: Path) -> None:
    (directory / "model.safetensors").write_text("<html>Sign in</html>" * 10)


def with_nan(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = torch.nan
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def with_gaps(directory: Path) -> None:
    file = "model-1-of-2.safetensors"
    index = {"metadata": {}, "weight_map": {"lm_head.weight": file, "model.norm.weight": "model-2-of-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").rename(directory / file)


def of_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def not_causal(directory: Path) -> None:
    config = hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, n_positions=CONTEXT)
    hf.T5ForConditionalGeneration(config).save_pretrained(directory)


def with_its_state_elsewhere(directory: Path) -> None:
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=8, num_heads=4, head_dim=8, n_groups=1)
    config = hf.Mamba2Config(**sizes)
    config.max_position_embeddings = CONTEXT
    hf.Mamba2ForCausalLM(config).save_pretrained(directory)


def says(**changes):
    """config.json has these values, too."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def has(name: str, content: bytes):
    return lambda directory: (directory / name).write_bytes(content)


REFUSED = [
    (without_a_weight, r"lacks weights: model.layers.1.mlp.up_proj.weight$"),
    (says(num_hidden_layers=4), r"lacks weights: model.layers.2.input_layernorm.weight and 17 more$"),
    (cut_off, r"model.safetensors is no safetensors file that can be read: .*incomplete"),
    (of_a_page, r"model.safetensors is no safetensors file that can be read"),
    (with_nan, r"weights are NaN or infinite in float32: model.layers.1.mlp.up_proj.weight and 1 more$"),
    (with_gaps, r"index.json names model-2-of-2.safetensors, which is missing \(1 of 2\)"),
    (of_pickles, r"has neither model.safetensors nor .*index.json \(there are pytorch_model.bin\)"),
    (not_causal, r"transformers 5\S+ knows no causal model of a T5Config$"),
    (with_its_state_elsewhere, r"Mamba2ForCausalLM cannot be served: .*linear_attention"),
    (has("config.json", b"{"), r"config.json cannot be used: .* is not a valid JSON file"),
    (has("config.json", b"[]"), r"config.json cannot be used: no model_type is named$"),
    (has("config.json", b"3"), r"config.json cannot be used: TypeError"),
    (says(model_type="of tomorrow"), r"transformers 5\S+ does not know its model_type `of tomorrow`$"),
    (
        says(model_type="other", auto_map={"AutoConfig": "a.B"}),
        r"needs model code of its own, which is never run here$",
    ),
    (says(model_type="timm_wrapper"), r"needs a Python package that is not installed: .*timm"),
    (says(hidden_size="16"), r"config.json cannot be used: Field 'hidden_size' expected int, got str"),
    (says(hidden_size=32), r"21 weights differ in shape .* such as lm_head.weight: \[32, 16\] instead of \[32, 32\]"),
    (says(num_attention_heads=0), r"config.json cannot be used: ZeroDivisionError"),
    (says(num_key_value_heads=0), r"ZeroDivisionError"),
    (says(hidden_act="of tomorrow"), r"KeyError: 'of tomorrow'"),
    (says(rope_parameters={"rope_type": "of tomorrow", "rope_theta": 1.0}), r"KeyError: 'of tomorrow'"),
    (says(rope_parameters={"rope_type": "default", "rope_theta": 0}), r"forward pass of LlamaForCausalLM gives NaN"),
    (says(max_position_embeddings=-1), r"config.json cannot be used: max_position_embeddings is -1$"),
    (says(vocab_size=0), r"config.json cannot be used: vocab_size is 0$"),
    (says(transformers_weights="other.safetensors"), r"config.json names weights of its own .*other.safetensors"),
    (has("generation_config.json", b"{"), r"generation_config.json cannot be used"),
    (has("generation_config.json", b"[]"), r"generation_config.json cannot be used"),
    (has("tokenizer.json", b"\x80\x04"), r"tokenizer.json is no tokenizer.json that can be read"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_checkpoint_that_cannot_be_served_is_one_sentence_that_names_it(directory, change, words, caplog):
    change(directory)
    caplog.set_level(logging.DEBUG, loading.__name__)
    with pytest.raises(ValueError, match=words) as error:
        load(directory, dtype="float32")
    assert str(error.value).startswith(f"{directory}: ")
    assert "\n" not in str(error.value)
    [traceback] = [record for record in caplog.records if record.exc_info]
    assert traceback.levelname == "DEBUG"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("no room"), "there is not enough memory for it: no room"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            "there is not enough memory for it: CUDA out of memory.",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9"), "there is not enough memory"),
        (ImportError("needs awq"), "needs a Python package that is not installed: needs awq"),
        (AssertionError(), "AssertionError"),
        (PermissionError(13, "Permission denied", "/x"), r"\[Errno 13\] Permission denied: '/x'"),
        (RuntimeError("x" * 10_000), r"x{300,399}…$"),
    ],
)
def test_whatever_a_library_raises_is_one_sentence(directory, monkeypatch, error, words):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(ValueError, match=rf"^{directory}: .*{words}"):
        load(directory)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(directory, monkeypatch):
    """Else the kernel kills the process, without a word."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", None)
    num = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    for dtype, size in (("float32", 4 * num), ("bfloat16", 2 * num)):
        with pytest.raises(
            ValueError, match=rf"its weights need {memory.size(size)} in {dtype}, and cpu has 1000 B free"
        ):
            load(directory, dtype=dtype)


def test_weights_that_the_model_does_not_use_are_warned_of(directory, caplog):
    says(num_hidden_layers=1)(directory)
    load(directory)
    [warning] = [record for record in caplog.records if "does not use" in record.message]
    assert warning.unused == "model.layers.1.input_layernorm.weight and 8 more"


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

    def recorded(*arguments: str, **options: str) -> Checkpoint:
        threads.append(threading.current_thread())
        return find(*arguments, **options)

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
