"""Which backend computes a model, and that the model digest knows it."""

from __future__ import annotations

import pytest
import torch

from specdec.backends.avx512 import kernels
from specdec.backends.choice import choose
from specdec.runner.checkpoint import Checkpoint
from tests.checkout import DEMO
from tests.models.backends import AVX512_ONLY, CPU, WHY_NOT_AVX512


def test_auto_is_the_quickest_backend_that_this_machine_can_run() -> None:
    assert choose("auto", CPU).name == ("torch" if WHY_NOT_AVX512 else "avx512")
    assert choose("torch", CPU).name == "torch"


def test_a_backend_that_cannot_compute_here_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--backend avx512 cannot be used: it computes on the CPU, not on meta"):
        choose("avx512", torch.device("meta"))
    monkeypatch.setattr(kernels, "has_avx512_bf16", lambda **_: False)
    with pytest.raises(ValueError, match="this CPU has no AVX512-BF16"):
        choose("avx512", CPU)
    assert choose("auto", CPU).name == "torch"


@AVX512_ONLY
def test_without_compiled_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", lambda: None)
    assert choose("auto", CPU).name == "torch"
    with pytest.raises(ValueError, match=r"not compiled.*make setup"):
        choose("avx512", CPU)


@AVX512_ONLY
def test_backends_that_give_other_bits_have_other_fingerprints() -> None:
    assert choose("torch", CPU).fingerprint != choose("avx512", CPU).fingerprint


def test_the_backend_for_gpus_is_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes on a CPU as well, for tests."""
    assert choose("cuda", CPU).name == "cuda"
    assert choose("cuda", CPU).fingerprint != choose("torch", CPU).fingerprint
    with pytest.raises(ValueError, match="--backend cuda cannot be used: it computes on GPUs of NVIDIA, not on meta"):
        choose("cuda", torch.device("meta"))
    monkeypatch.setattr("specdec.backends.cuda.backend.find_spec", lambda name: None)
    monkeypatch.setattr("specdec.backends.choice.TorchBackend", lambda device: None)
    with pytest.raises(ValueError, match="it needs triton"):
        choose("cuda", torch.device("cuda:0"))


def test_replicas_with_equal_digests_compute_with_the_same_backend() -> None:
    def digest(backend: str, fingerprint: str) -> str:
        return Checkpoint.find(str(DEMO / "draft"), "float32", backend, fingerprint).info.model_digest

    assert digest("torch", "torch 2, AVX2") == digest("torch", "torch 2, AVX2")
    assert len({digest("torch", "torch 2, AVX2"), digest("torch", "torch 2, AVX512"), digest("avx512", "1")}) == 3
