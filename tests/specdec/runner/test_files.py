"""Which files of a hub's checkpoint are fetched, and of which commit."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specdec.runner import files
from specdec.runner.files import directory_of, read_json, weight_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
DESCRIBED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
OTHERS = [
    "consolidated.safetensors",
    "original/params.json",
    "onnx/config.json",
    "pytorch_model.bin",
    "model.fp16.safetensors",
]


class Hub:
    """A hub with one checkpoint, which a branch "main" and a tag "v1" name."""

    def __init__(self, cache: Path, weights: list[str]) -> None:
        self.cache, self.fetched, self.asked = cache, set[str](), list[str | None]()
        self.contents = dict.fromkeys([*DESCRIBED, *OTHERS, *weights], "{}")
        if len(weights) > 1:
            weight_map = {f"tensor{number}": name for number, name in enumerate(weights)}
            self.contents[files.INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map})

    def snapshot_download(self, name: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append(revision)
        if revision not in (None, "main", "v1", COMMIT):
            raise LocalEntryNotFoundError(f"no {revision}")
        directory = self.cache / COMMIT
        for file, content in self.contents.items():
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                self.fetched.add(file)
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                (directory / file).write_text(content)
        return str(directory)


@pytest.mark.parametrize("weights", [["model.safetensors"], SHARDS], ids=["whole", "sharded"])
@pytest.mark.parametrize("revision", ["", "v1"])
def test_what_is_fetched_is_what_is_used(tmp_path, monkeypatch, weights, revision):
    hub = Hub(tmp_path, weights)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    directory = directory_of("someone/large", revision)
    assert hub.fetched == {*DESCRIBED, *weights} | ({files.INDEX} if len(weights) > 1 else set())
    assert weight_files(directory) == weights
    assert hub.asked == [revision or None, COMMIT], "the weights are of the commit that the configuration is of"


def test_a_revision_that_the_hub_does_not_have_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, SHARDS).snapshot_download)
    with pytest.raises(ValueError, match=r"that the hub can give at revision v2: no v2"):
        directory_of("someone/large", "v2")


def test_variables_that_decide_how_a_hub_is_reached_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, SHARDS).snapshot_download)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    with pytest.raises(ValueError, match=r"no v2 \(the environment sets .*SSL_CERT_FILE"):
        directory_of("someone/large", "v2")


def test_a_directory_has_no_revision(tmp_path):
    assert directory_of(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="--revision is for hub ids"):
        directory_of(str(tmp_path), "v1")


@pytest.mark.parametrize("errno", [13, 28, 30])
def test_a_cache_that_cannot_be_written_is_told_in_words(monkeypatch, errno):
    def download(*_, **__):
        raise OSError(errno, "cannot be written", "/cache/hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"the hub's cache cannot be written: .*'/cache/hub'; HF_HOME names another"):
        directory_of("someone/large")


BROKEN = {
    "empty": b"",
    "a list": b"[1]",
    "cut": b"{",
    "not fetched": b"version https://git-lfs.github.com/spec/v1",
    "no text": b"\xff\xfe\x00",
    "deep": b'{"a":' * 100_000,
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_without_a_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / files.INDEX).write_bytes(content)
    for read in (lambda: read_json(tmp_path / files.INDEX), lambda: weight_files(tmp_path)):
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            read()
    assert read_json(None) == {}


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_without_names_of_files_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / files.INDEX).write_text(content)
    with pytest.raises(ValueError, match="has no object weight_map"):
        weight_files(tmp_path)
