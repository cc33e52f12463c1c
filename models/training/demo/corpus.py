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

from tokenizers import Tokenizer

from models.training.texts import Text

HELD_OUT_SHARE = 0.03
"""Share of the files that no model and no tokenizer is trained on."""

TEST_SHARE = 0.4
"""Share of the library's test files that is kept. All of them would be 60 % of the text."""

MAX_FILE_BYTES = 400_000

EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
"""Folders that are not part of the library, or have tables instead of code."""

TEST_DIRS = frozenset({"test", "tests", "idle_test"})

WINDOW = 512
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the library's root, and its text."""

    path: str
    text: str


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


def load() -> tuple[list[Document], list[Document]]:
    """The library's documents in hash order: those to train on, and those held out."""
    documents = sorted(
        _sources(Path(sysconfig.get_paths()["stdlib"])), key=lambda document: _fraction(document.path, "order")
    )
    parts: tuple[list[Document], list[Document]] = [], []
    for document in documents:
        parts[_fraction(document.path, "held-out") < HELD_OUT_SHARE].append(document)
    return parts


def windows(documents: Iterable[Document], tokenizer: Tokenizer, first: int) -> list[Text]:
    """The documents as texts of 512 predicted tokens, whose answers begin at ``first``.

    The end-of-text token is before and after every document. The last token of a window is the first of the next one.
    """
    separator = tokenizer.token_to_id(END_OF_TEXT)
    stream = [separator]
    for document in documents:
        stream += [*tokenizer.encode(document.text).ids, separator]
    return [Text(stream[start : start + WINDOW + 1], first) for start in range(0, len(stream) - WINDOW, WINDOW)]
