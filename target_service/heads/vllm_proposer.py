"""What a target on vLLM drafts with by itself, in vLLM's words. Knows folders; does not know passes.

vLLM has a proposer for heads of EAGLE's kinds, for DFlash, for a small model in the same process, and for the layers
that some checkpoints bring along (multi-token prediction, MTP). It reads their folders itself, with one exception: a
head that has no output rows of its own, and leaves out a part of the vocabulary, gets a copy of the target's rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.runner.failures import in_words
from specdec.runner.files import SINGLE, directory_of, read_json, weight_files
from specdec.vllm.passes import Proposer
from target_service.heads.checkpoint import EAGLE, EAGLE3, HeadFiles, read_head

log = logging.getLogger(__name__)

MTP = "mtp"
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_OF_HEADS = re.compile(r"(^|\.)fc\.weight$|medusa")
_OUTPUT_ROWS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""A target's, in the order in which they are looked for: where the first is missing, it is tied to the second."""


@contextlib.contextmanager
def proposer(head: str, self_draft: str, target: str, revision: str) -> Iterator[Proposer | None]:
    """Of the settings with these names; None without any. What it names exists as long as the context. Raises
    ValueError for a folder of which vLLM has no proposer."""
    try:
        directory = directory_of(target, revision)
        config = read_json(directory / "config.json")
    except Exception as error:  # as for the model that is loaded next
        raise ValueError(f"{target}: {in_words(error)}") from error
    has_mtp = any(config.get(name) for name in _MTP_LAYERS)
    if self_draft == MTP:
        if not has_mtp:
            raise ValueError(f"self_draft: {target} has no layers for multi-token prediction (MTP)")
        yield Proposer(MTP, {"method": MTP})
    elif not head:
        if has_mtp:
            log.info("the checkpoint has layers for multi-token prediction: --self-draft mtp drafts with them")
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="specdec-head-") as scratch:
            yield _of_folder(Path(head), directory, Path(scratch))


def _of_folder(head: Path, target: Path, scratch: Path) -> Proposer:
    config = read_json(head / "config.json")
    if "dflash" in str(config.get("architectures")).lower():
        return Proposer("dflash", {"method": "dflash", "model": str(head)})
    if _is_model(head):
        return Proposer("draft_model", {"method": "draft_model", "model": str(head)})
    files = read_head(head)
    if files.kind not in (EAGLE, EAGLE3):
        raise ValueError(f"{head} is a head of the kind {files.kind}, for which engine vllm has no proposer")
    if biases := [name for name in files.weights if name.endswith(".bias")]:
        raise ValueError(f"{head} has {biases[0]}, for which vLLM's layer has no place: serve it with engine torch")
    if files.ids is not None and "lm_head.weight" not in files.weights:
        head = _with_output_rows(files, config, target=target, scratch=scratch)
    return Proposer(files.kind, {"method": files.kind, "model": str(head)})


def _is_model(folder: Path) -> bool:
    """Whether it is a whole model, which heads of EAGLE's kinds call themselves, too."""
    try:
        names = {name for file in weight_files(folder) for name in _names(folder / file)}
    except Exception:  # read_head says what is wrong with it
        return False
    return "model.layers.0.self_attn.q_proj.weight" in names and not any(map(_OF_HEADS.search, names))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _with_output_rows(files: HeadFiles, config: Mapping[str, Any], *, target: Path, scratch: Path) -> Path:
    assert files.ids is not None
    offsets = files.ids - torch.arange(len(files.ids))
    rows = _output_rows(target)
    if not 0 <= int(files.ids.min()) <= int(files.ids.max()) < len(rows):
        raise ValueError(f"{files.name} has ids of another vocabulary than {target}")
    rows = rows[files.ids].clone()
    save_file({**files.weights, "d2t": offsets, "lm_head.weight": rows}, scratch / SINGLE)
    (scratch / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return scratch


def _output_rows(target: Path) -> Tensor:
    """[vocab, hidden]. Raises ValueError if the target keeps them in no known place or in another form."""
    for name in _OUTPUT_ROWS:
        for file in weight_files(target):
            if name in _names(target / file):
                with safe_open(target / file, "pt") as tensors:
                    rows: Tensor = tensors.get_tensor(name)
                    return rows
    raise ValueError(f"{target} has none of {', '.join(_OUTPUT_ROWS)}: the rows that the head leaves out")
