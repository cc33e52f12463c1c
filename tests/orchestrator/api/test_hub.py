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

    def download(name, file):
        asked.append((name, file))
        return str(BUNDLED / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_tokenizer("someone/large").get_vocab_size() == load_tokenizer(str(BUNDLED)).get_vocab_size()
    assert asked == [("someone/large", "tokenizer.json")]


def test_a_hub_that_cannot_be_reached_is_told_in_words(monkeypatch):
    def download(name, file):
        raise LocalEntryNotFoundError("no network, and nothing of it is kept here")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ValueError, match=r"--tokenizer: someone/large is neither .* nor can a hub give it: no network"):
        load_tokenizer("someone/large")


def test_a_path_that_is_not_there_is_no_hub_id_and_is_told_in_words(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=f"--tokenizer: {missing} is neither"):
        load_tokenizer(str(missing))


def test_a_directory_without_a_tokenizer_is_told_in_words(tmp_path):
    with pytest.raises(ValueError, match=f"--tokenizer: {tmp_path} is neither"):
        load_tokenizer(str(tmp_path))
