"""The tokenizer of a target that is named by its hub id, as the target itself is."""

from __future__ import annotations

import shutil

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from orchestrator.tokenizer.files import TokenizerFiles, find
from tests.checkout import DEMO

BUNDLED = DEMO / "target"


def no_hub(*_, **__):
    raise AssertionError("a file is there: no hub is needed")


def test_what_is_on_this_machine_is_asked_of_no_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    for path in (BUNDLED, BUNDLED / "tokenizer.json"):
        found = find(str(path))
        assert found.tokenizer == BUNDLED / "tokenizer.json"
        assert (found.config, found.template) == (BUNDLED / "tokenizer_config.json", BUNDLED / "chat_template.jinja")
        assert found.generation == BUNDLED / "generation_config.json"
    assert find("") is None


def test_what_a_model_lacks_is_none(tmp_path):
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    assert find(str(tmp_path)) == TokenizerFiles(tmp_path / "tokenizer.json")


def test_a_hub_id_gives_the_tokenizer_of_that_model(monkeypatch):
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < set(allow_patterns)
        return str(BUNDLED)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("someone/large") == find(str(BUNDLED))
    find("someone/large", "v1")
    assert asked == [("someone/large", None), ("someone/large", "v1")]


def test_a_hub_id_without_a_tokenizer_is_told_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"the hub's someone/large has no tokenizer.json"):
        find("someone/large")


def test_what_is_on_this_machine_has_no_revision():
    for path in (BUNDLED, BUNDLED / "tokenizer.json"):
        with pytest.raises(ValueError, match="--revision is for hub ids"):
            find(str(path), "v1")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError, OSError, RuntimeError])
def test_a_hub_that_cannot_be_reached_is_told_in_words(monkeypatch, error):
    def download(name, revision, allow_patterns):
        raise error("no network,\nand nothing of it is kept here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"someone/large is neither .* nor can a hub give it: no network, and nothing"):
        find("someone/large")
    with pytest.raises(ValueError, match="nor can a hub give it at revision v1: no network"):
        find("someone/large", "v1")


def test_variables_that_decide_how_a_hub_is_reached_are_named(monkeypatch):
    def download(name, revision, allow_patterns):
        raise OSError("no such file")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name in ("HF_ENDPOINT", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"\(the environment sets .*HF_ENDPOINT.*, HTTPS_PROXY"):
        find("someone/that-is-not-there")


def test_a_path_that_is_not_there_is_no_hub_id_and_is_told_in_words(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=f"--tokenizer: {missing} is neither"):
        find(str(missing))


def test_a_directory_without_a_tokenizer_is_told_in_words(tmp_path):
    with pytest.raises(ValueError, match=f"--tokenizer: {tmp_path} is neither"):
        find(str(tmp_path))
