"""The training text: the standard library of the running interpreter, split by file.

The hash of a file's path relative to the library's root decides everything, so the same interpreter
release always gives the same documents, the same split and the same order.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.training.tokenizer import END_OF_TEXT, end_of_text

HELD_OUT_SHARE = 0.03
"""Share of the files that no model and no tokenizer is trained on."""

TEST_SHARE = 0.4
"""Share of the library's own test files that is kept. All of them would be 60 % of the text."""

MAX_FILE_BYTES = 400_000

EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
"""Folders that are not part of the library, or have tables instead of code."""

TEST_DIRS = frozenset({"test", "tests", "idle_test"})

TokenStream = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the library's root, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents to train on and documents kept for evaluation."""

    train: list[Document]
    held_out: list[Document]


def _fraction(path: str, purpose: str) -> float:
    """A number in [0, 1) that depends only on the path and the purpose."""
    digest = hashlib.sha256(f"{purpose}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _sources(root: Path) -> Iterator[Document]:
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        folders = frozenset(relative.parts[:-1])
        path = relative.as_posix()
        if folders & EXCLUDED_DIRS or file.stat().st_size > MAX_FILE_BYTES:
            continue
        if folders & TEST_DIRS and _fraction(path, "test-share") >= TEST_SHARE:
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "\0" not in text and END_OF_TEXT not in text:
            yield Document(path, text.replace("\r\n", "\n"))


def load(root: Path | None = None) -> Split:
    """The library's documents in hash order, split into training and held-out files."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = sorted(_sources(root), key=lambda document: _fraction(document.path, "order"))
    held = {d.path for d in documents if _fraction(d.path, "held-out") < HELD_OUT_SHARE}
    return Split(
        train=[d for d in documents if d.path not in held],
        held_out=[d for d in documents if d.path in held],
    )


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStream:
    """One stream of token ids, with the end-of-text token before and after every document."""
    separator = np.array([end_of_text(tokenizer)], dtype=np.uint16)
    parts = [separator]
    for document in documents:
        parts += [np.array(tokenizer.encode(document.text).ids, dtype=np.uint16), separator]
    return np.concatenate(parts)
