"""``specdec ngram build FILES --tokenizer T --output MODEL.npz``: an n-gram model of texts, as a draft.

One text per file. Texts like those that will be asked for are worth most.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from specdec.core.settings import lacks
from specdec.runner.vocabulary import Vocabulary, read_tokenizer


def main(
    files: Annotated[list[Path], typer.Argument(exists=True, help="texts in UTF-8; directories with all their files")],
    tokenizer: Annotated[Path, typer.Option(exists=True, help="the target's directory or tokenizer.json")],
    output: Annotated[Path, typer.Option(help="file to write")],
) -> None:
    """Count which tokens follow the last one to four tokens in texts."""
    console = Console()
    try:
        # Imported here, since numpy is an extra.
        from draft_service.drafters.ngram_model import build

        reader = read_tokenizer(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        print(f"specdec: {lacks(error)}", file=sys.stderr)
        raise typer.Exit(2) from error
    entries = [entry for path in files for entry in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = []
    for file in track([entry for entry in entries if entry.is_file()], "Reading", console=console):
        with contextlib.suppress(UnicodeDecodeError):  # no text
            texts.append(reader.encode(file.read_text("utf-8"), add_special_tokens=False).ids)
    vocabulary = Vocabulary.of(reader)
    with console.status("Counting ..."):
        model = build(texts, len(vocabulary), vocabulary.fingerprint)
        model.save(output)
    size = output.stat().st_size / 2**20
    console.print(f"{output}: {sum(map(len, texts)):,} tokens of {len(texts)} texts, {size:.1f} MiB", highlight=False)
    console.print(f"specdec serve draft --ngram {output}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
