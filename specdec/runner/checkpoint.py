"""A model's files and its identity (digest, vocabulary, context length). Does not load weights."""

from __future__ import annotations

import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.core.rounds import ModelInfo
from specdec.runner.vocabulary import read_vocabulary

SAMPLING_VERSION = "2"
"""Part of every digest; to be raised when the same weights and seed would give another text."""

_DIGEST_VERSION = "4"
_HASHING_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on this machine in Hugging Face format."""

    directory: Path
    dtype: str
    info: ModelInfo

    @staticmethod
    def find(model: str, dtype: str, backend: str = "", fingerprint: str = "") -> Checkpoint:
        """Find the checkpoint ``model``, a directory or a hub id (fetched, or from the hub's cache).

        ``dtype`` "auto" is the checkpoint's own; ``backend`` and ``fingerprint``: see specdec.backends.base.Backend.
        Raises ValueError, with a message for the operator, if it is not a safetensors checkpoint.
        """
        directory = Path(model)
        if not directory.is_dir():
            directory = _from_hub(model)
        config_file = directory / "config.json"
        weights = sorted(directory.glob("*.safetensors"))
        if not config_file.is_file() or not weights:
            raise ValueError(f"{model} has no config.json with *.safetensors beside it")
        config = _read_json(config_file)
        text_config = config.get("text_config", config)
        if dtype == "auto":
            dtype = _own_dtype(text_config) or _own_dtype(config) or "float32"
        vocab_size, tokenizer = text_config.get("vocab_size"), ""
        if not isinstance(vocab_size, int):
            raise ValueError("config.json does not say how large the model's vocabulary is (vocab_size)")
        if (directory / "tokenizer.json").is_file():
            vocabulary = read_vocabulary(directory / "tokenizer.json")
            # Rows beyond the tokenizer's ids are padding, which differs between models of one family.
            vocab_size = min(vocab_size, vocabulary.size)
            tokenizer = vocabulary.fingerprint
        eos_token_ids = _eos_token_ids(directory, config)
        # These affect the tokens that may be drawn, and the end of a text.
        facts = {"dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer, "eos_token_ids": eos_token_ids}
        facts["backend"] = fingerprint
        info = ModelInfo(
            name=directory.resolve().name if Path(model).is_dir() else model,
            model_digest=_digest([config_file, *weights], facts),
            vocab_size=vocab_size,
            tokenizer_fingerprint=tokenizer,
            context_length=_context_length(text_config),
            dtype=dtype,
            eos_token_ids=eos_token_ids,
            backend=backend,
        )
        return Checkpoint(directory, dtype, info)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{model} is neither a directory nor a checkpoint the hub can give: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return content


def _digest(files: list[Path], facts: dict[str, Any]) -> str:
    """The digest of all inputs that affect the output: the content of ``files``, and ``facts`` that are not in them."""
    # Hashing releases the interpreter lock, and a large model has many files.
    with ThreadPoolExecutor(_HASHING_THREADS, "hashing") as hashing:
        hashes = dict(zip((file.name for file in files), hashing.map(_file_hash, files), strict=True))
    known = {"version": _DIGEST_VERSION, "sampling": SAMPLING_VERSION, **facts, "files": hashes}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype", config.get("torch_dtype")) or ""
    if dtype not in ("", "float32", "bfloat16", "float16"):
        raise ValueError(f"the checkpoint's weights are {dtype}; choose float32, bfloat16 or float16")
    return str(dtype)


def _context_length(config: dict[str, Any]) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(config.get(name), int):
            return int(min(config[name], _same_positions(config)))
    raise ValueError("config.json does not say how long the model's context is")


def _same_positions(config: dict[str, Any]) -> float:
    """The number of positions with one encoding. Beyond it, "longrope" encodes all positions of a pass differently: a
    row would depend on the other rows of its pass, and cached keys would be wrong."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return math.inf
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return original if isinstance(original, int) else math.inf


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
