"""Which files are a checkpoint, in a directory or fetched from a hub. Does not know models, and needs no torch."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path
from typing import Any

from specdec.core.environment import of_hub

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
ADAPTER = "adapter_config.json"
DESCRIPTIONS = (
    *("config.json", "generation_config.json", INDEX, ADAPTER),
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
"""All files that are read in addition to the weights."""

_POINTER = b"version https://git-lfs"

_MAX_INFLATION = 16
"""Bytes in memory per byte of an archive. Weights hardly shrink, and n-gram models at most to a tenth."""


def directory_of(model: str, revision: str = "") -> Path:
    """The directory ``model``, or that of the hub id ``model`` in the hub's cache, of which the used files are fetched.

    Raises ValueError, with the reason in words, if there is none.
    """
    if Path(model).is_dir():
        if revision:
            raise ValueError("--revision is for hub ids, and this is a directory")
        return Path(model)
    if Path(model).is_file():
        raise ValueError("this is a file; a model is the directory with its config.json and weights")
    if model.startswith(("/", ".", "~")):
        raise ValueError("there is no such directory")
    return _fetched(model, revision)


def weight_files(directory: Path) -> list[str]:
    """The files with the weights, as transformers chooses them: model.safetensors, else those that the index names.

    Raises ValueError, with the reason in words, if one is missing.
    """
    names = _weight_names(directory)
    if missing := [name for name in names if not (directory / name).is_file()]:
        if names != [SINGLE]:
            raise ValueError(f"{INDEX} names {missing[0]}, which is missing ({len(missing)} of {len(names)})")
        others = sorted(file.name for file in directory.glob("*") if file.suffix in (".safetensors", ".bin", ".gguf"))
        there = f" (there are {', '.join(others[:3])})" if others else ""
        raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}{there}")
    return names


def refuse_pointer(file: Path) -> None:
    """Raises ValueError if ``file`` is what Git leaves in place of a large file that was not fetched."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` there")


def refuse_inflated(file: Path) -> None:
    """Raises ValueError if ``file`` is a zip archive that would take far more memory than it takes on the disk."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_INFLATION * file.stat().st_size:
            raise ValueError(f"{file} would take {size} bytes of memory, over {_MAX_INFLATION} times its own size")


def read_text(file: Path) -> str:
    """The text of a file in UTF-8. Raises ValueError, with the file's name, if there is none."""
    try:
        refuse_pointer(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def read_json(file: Path | None) -> dict[str, Any]:
    """The object in a file; empty without a file. Raises ValueError, with the file's name, if there is none in it."""
    if file is None:
        return {}
    text = read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def _weight_names(directory: Path) -> list[str]:
    index = directory / INDEX
    if (directory / SINGLE).is_file() or not index.is_file():
        return [SINGLE]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index} is no index of weights: it has no object weight_map")
    return sorted(set(map(str, names.values()))) or [SINGLE]


def _fetched(model: str, revision: str) -> Path:
    # Imported here, since a directory does not need it.
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model, revision=revision or None, allow_patterns=list(DESCRIPTIONS)))
        # Of the same commit, whatever is pushed meanwhile.
        snapshot_download(model, revision=directory.name, allow_patterns=_weight_names(directory))
    except Exception as error:  # the client passes on those of several libraries
        what = "this is neither a directory nor a checkpoint that the hub can give"
        raise ValueError(f"{what}{why_not_given(error, revision)}") from error
    return directory


def why_not_given(error: Exception, revision: str) -> str:
    """The end of a sentence that a hub cannot give something."""
    why = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC):
        why = f"the hub's cache cannot be written: {why}; HF_HOME names another place"
    return f"{f' at revision {revision}' if revision else ''}: {why}{of_hub()}"
