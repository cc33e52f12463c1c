"""Tests of the engine vllm itself: ``make test-vllm``. Elsewhere, without vLLM, there is nothing to collect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from specdec.core.settings import ModelServiceSettings, VllmSettings
from tests.checkout import DEMO
from tests.parity.conftest import device, draft_runner, near_tie, prompts, reference, target_runner  # noqa: F401

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def settings(model: str, **fields: Any) -> ModelServiceSettings:
    """In float32 and without compilation, which takes minutes on a CPU."""
    named = {"max_num_seqs": 16, "enforce_eager": True, **fields.pop("vllm", {})}
    given = {
        "dtype": "float32",
        "engine": "vllm",
        "kv_slots": 16384,
        "memory_fraction": 0.1,  # for all engines of these tests together
        "vllm": VllmSettings(**named),
        **fields,
    }
    return ModelServiceSettings(model=model, **given)


@pytest.fixture(scope="session")
def load() -> Iterator[Callable[..., Any]]:
    """Loads a model into vLLM for a service. All engines are shut down at the end."""
    from specdec.vllm.loading import load_engine

    engines = []

    def loaded(made: ModelServiceSettings, sampler: str) -> Any:
        engine, info = load_engine(made, sampler)
        engines.append(engine)
        return engine, info

    yield loaded
    for engine in engines:
        engine.shut_down()


@pytest.fixture(scope="session")
def target_model() -> str:
    return str(DEMO / "target")


@pytest.fixture(scope="session")
def draft_model() -> str:
    return str(DEMO / "draft")
