"""Extracts the demo prompts from the held-out files.

    python -m models.training.prompts

A prompt begins at a definition and ends after a signature, or after its docstring if there is one.
So it is followed by code.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from tokenizers import Tokenizer

from models.training import corpus
from models.training import tokenizer as bpe

COUNT = 64
MIN_TOKENS, MAX_TOKENS = 40, 200
DEMO = Path(__file__).resolve().parent.parent / "demo"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(text: str) -> list[Definition]:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Definition)]
    return sorted(found, key=lambda node: node.lineno)


def _last_line(node: Definition) -> int:
    """The last line of the node's docstring, or its first line if it has no docstring."""
    body = node.body[0]
    if ast.get_docstring(node) is not None:
        return body.end_lineno or body.lineno
    return node.lineno


def _cuts(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Prompts of one file that do not overlap; those that end after a docstring come first."""
    lines = text.split("\n")
    definitions = _definitions(text)
    functions = [node for node in definitions if not isinstance(node, ast.ClassDef)]
    taken: set[int] = set()
    for node in sorted(functions, key=lambda node: (ast.get_docstring(node) is None, node.lineno)):
        end = _last_line(node)
        for start in reversed([first.lineno for first in definitions if first.lineno <= node.lineno]):
            prompt = "\n".join(lines[start - 1 : end])
            size = len(tokenizer.encode(prompt).ids)
            if size > MAX_TOKENS or taken.intersection(range(start, end + 1)):
                break
            if size >= MIN_TOKENS and prompt.endswith((":", '"""', "'''", '"')):
                taken.update(range(start, end + 1))
                yield prompt
                break


def cut(documents: list[corpus.Document], tokenizer: Tokenizer, count: int) -> list[dict[str, str]]:
    """Prompts taken in turn from every file, so that no file dominates. Raises ValueError if the tokenizer is lossy."""
    columns = [[(d.path, prompt) for prompt in _cuts(d.text, tokenizer)] for d in documents]
    in_turn = [entry for row in zip_longest(*columns) for entry in row if entry is not None]
    for _, prompt in in_turn:
        if tokenizer.decode(tokenizer.encode(prompt).ids) != prompt:
            raise ValueError(f"the tokenizer does not restore the prompt {prompt!r}")
    return [{"file": path, "text": prompt} for path, prompt in in_turn[:count]]


def main() -> None:
    """Write prompts.json next to the models."""
    parser = argparse.ArgumentParser(description="Extract the demo prompts from the held-out files.")
    parser.add_argument("--output", type=Path, default=DEMO, help="directory of the pair")
    directory: Path = parser.parse_args().output
    prompts = cut(corpus.load().held_out, bpe.load(directory / "target"), COUNT)
    (directory / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts from {len({prompt['file'] for prompt in prompts})} files")


if __name__ == "__main__":
    main()
