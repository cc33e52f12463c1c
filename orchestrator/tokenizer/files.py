"""The files of a model's tokenizer: in a directory, or from a hub and its cache on this machine (HF_HOME).

Knows names of files and the hub's client; does not know what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec.runner.files import TOKENIZER, why_not_given

CONFIG, TEMPLATE, GENERATION = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``tokenizer``: a tokenizer.json. The others are None where a model has none."""

    tokenizer: Path
    config: Path | None = None
    template: Path | None = None
    generation: Path | None = None
    further_templates: tuple[Path, ...] = ()
    """By their names, such as tool_use.jinja."""


def find(name: str, revision: str = "") -> TokenizerFiles | None:
    """The files of a tokenizer.json, of a directory that has one, or of a hub id at ``revision`` (empty: its main
    branch). None for an empty name. Raises ValueError, with the reason in words, if there is none."""
    if not name:
        return None
    file = Path(name)
    file = file / TOKENIZER if file.is_dir() else file
    if not file.is_file():
        return _fetched(name, revision)
    if revision:
        raise ValueError("--revision is for hub ids, and --tokenizer names a file or directory")
    others = [file.parent / other for other in (CONFIG, TEMPLATE, GENERATION)]
    config, template, generation = (other if other.is_file() else None for other in others)
    further = tuple(sorted((file.parent / TEMPLATES).glob("*.jinja")))
    return TokenizerFiles(file, config, template, generation, further)


def _fetched(name: str, revision: str) -> TokenizerFiles:
    # Imported here, since a tokenizer from a file does not need it.
    from huggingface_hub import snapshot_download

    try:
        wanted = [TOKENIZER, CONFIG, TEMPLATE, GENERATION, f"{TEMPLATES}/*.jinja"]
        directory = Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # the client passes on those of several libraries
        what = f"--tokenizer: {name} is neither a {TOKENIZER}, nor a directory with one, nor can a hub give it"
        raise ValueError(f"{what}{why_not_given(error, revision)}") from error
    if not (directory / TOKENIZER).is_file():
        raise ValueError(f"--tokenizer: the hub's {name} has no {TOKENIZER}")
    files = find(str(directory))
    assert files is not None, "a name that is not empty"
    return files
