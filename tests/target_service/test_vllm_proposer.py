"""A head's folder, in vLLM's words: what it has a proposer for, and what is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from target_service.heads.checkpoint import read_head
from target_service.heads.vllm_proposer import proposer
from tests.checkout import DEMO
from tests.parity.written_heads import CONFIG, eagle_weights, folder, medusa_weights, weights

TARGET = str(DEMO / "target")


def words(head: Path | str = "", target: str = TARGET, self_draft: str = "") -> dict[str, Any] | None:
    with proposer(str(head), self_draft, target, "") as chosen:
        return None if chosen is None else dict(chosen.words)


def copied(at: Path, **config: Any) -> str:
    """The demo target's configuration, changed."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps(json.loads((DEMO / "target/config.json").read_text()) | config))
    return str(at)


def test_without_a_head_there_is_none() -> None:
    assert words() is None


@pytest.mark.parametrize("kind", ["original", "SpecForge", "speculators"])
def test_a_head_with_output_rows_is_read_where_it_is(tmp_path: Path, kind: str) -> None:
    assert words(folder(tmp_path, kind, weights())) == {"method": "eagle3", "model": str(tmp_path)}


def test_a_reduced_vocabulary_without_output_rows_gets_the_targets(tmp_path: Path) -> None:
    tensors = weights()
    tensors.pop("lm_head.weight")
    folder(tmp_path, "SpecForge", tensors)
    with proposer(str(tmp_path), "", TARGET, "") as chosen:
        assert chosen is not None
        at = Path(chosen.words["model"])
        copy, files = load_file(at / "model.safetensors"), read_head(at)
    assert not at.exists()
    rows = load_file(DEMO / "target/model.safetensors")["model.embed_tokens.weight"]
    assert files.ids is not None
    assert torch.equal(copy["lm_head.weight"], rows[files.ids])
    assert torch.equal(copy["d2t"], tensors["d2t"])
    assert torch.equal(copy["fc.weight"], tensors["fc.weight"])


def test_a_small_model_drafts_in_the_targets_process() -> None:
    assert words(DEMO / "draft") == {"method": "draft_model", "model": str(DEMO / "draft")}


def test_a_folder_of_dflash_is_known_by_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    assert words(tmp_path) == {"method": "dflash", "model": str(tmp_path)}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (eagle_weights(), r"has fc\.bias, for which vLLM's layer has no place"),
        (medusa_weights(), "a head of the kind medusa, for which engine vllm has no proposer"),
        ({"x": torch.zeros(1)}, "holds no head that can be used"),
    ],
)
def test_what_has_no_proposer_is_refused_by_name(tmp_path: Path, tensors: Any, problem: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=problem):
        words(tmp_path)


@pytest.mark.parametrize("content", ['{"architectures": [7]}', '{"architectures": "x"}', "[]", "{"])
def test_a_broken_folder_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=tmp_path.name):
        words(tmp_path)


def test_a_target_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="/nowhere: there is no such directory"):
        words(target="/nowhere")


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = weights()
    tensors.pop("lm_head.weight")
    tensors["d2t"] = tensors["d2t"] + 9999
    with pytest.raises(ValueError, match="has ids of another vocabulary"):
        words(folder(tmp_path, "SpecForge", tensors))


def test_layers_for_multi_token_prediction_are_named_and_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = copied(tmp_path / "target", num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        assert words(target=target) is None
    assert "--self-draft mtp" in caplog.text
    assert words(target=target, self_draft="mtp") == {"method": "mtp"}
    with pytest.raises(ValueError, match="has no layers for multi-token prediction"):
        words(self_draft="mtp")
