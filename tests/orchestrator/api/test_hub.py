"""The tokenizer of a target that is named by its hub id, as the target itself is."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from orchestrator.api.server import load_tokenizer
from tests.checkout import DEMO

BUNDLED = DEMO / "target"


def no_hub(*_):
    raise AssertionError("a file is there: no hub is needed")


def test_what_is_on_this_machine_is_asked_of_no_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_hub)
    for path in (BUNDLED, BUNDLED / "tokenizer.json"):
        assert load_tokenizer(str(path)).get_vocab_size() > 0
    assert load_tokenizer("") is None


def test_a_hub_id_gives_the_tokenizer_of_that_model(monkeypatch):
    asked = []

    def download(name, file, revision):
        asked.append((name, file, revision))
        return str(BUNDLED / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_tokenizer("someone/large").get_vocab_size() == load_tokenizer(str(BUNDLED)).get_vocab_size()
    load_tokenizer("someone/large", "v1")
    assert asked == [("someone/large", "tokenizer.json", None), ("someone/large", "tokenizer.json", "v1")]


def test_what_is_on_this_machine_has_no_revision():
    for path in (BUNDLED, BUNDLED / "tokenizer.json"):
        with pytest.raises(ValueError, match="--revision is for hub ids"):
            load_tokenizer(str(path), "v1")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError, OSError, RuntimeError])
def test_a_hub_that_cannot_be_reached_is_told_in_words(monkeypatch, error):
    def download(name, file, revision):
        raise error("no network,\nand nothing of it is kept here")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ValueError, match=r"someone/large is neither .* nor can a hub give it: no network, and nothing"):
        load_tokenizer("someone/large")
    with pytest.raises(ValueError, match="nor can a hub give it at revision v1: no network"):
        load_tokenizer("someone/large", "v1")


def test_variables_that_decide_how_a_hub_is_reached_are_named(monkeypatch):
    def download(name, file, revision):
        raise OSError("no such file")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for name in ("HF_ENDPOINT", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"\(the environment sets .*HF_ENDPOINT.*, HTTPS_PROXY"):
        load_tokenizer("someone/that-is-not-there")


def test_a_path_that_is_not_there_is_no_hub_id_and_is_told_in_words(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=f"--tokenizer: {missing} is neither"):
        load_tokenizer(str(missing))


def test_a_directory_without_a_tokenizer_is_told_in_words(tmp_path):
    with pytest.raises(ValueError, match=f"--tokenizer: {tmp_path} is neither"):
        load_tokenizer(str(tmp_path))
