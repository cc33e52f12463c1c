"""The demo prompts: beginnings of definitions in held-out files.

A prompt begins at a definition and ends after a signature, or after its docstring if there is one. So code follows it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from tokenizers import Tokenizer

from models.training.demo.corpus import Document

COUNT = 64
MIN_TOKENS, MAX_TOKENS = 40, 200

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _last_line(function: Function) -> int:
    """Of the docstring, or of the signature if there is none."""
    body = function.body[0]
    return (body.end_lineno or body.lineno) if ast.get_docstring(function) is not None else function.lineno


def _cuts(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Prompts of one file that do not overlap; those that end after a docstring come first."""
    lines = text.split("\n")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function | ast.ClassDef)]
    starts = sorted((node.lineno for node in nodes), reverse=True)
    functions = [node for node in nodes if isinstance(node, Function)]
    used_lines: set[int] = set()
    for function in sorted(functions, key=lambda node: (ast.get_docstring(node) is None, node.lineno)):
        end = _last_line(function)
        for start in starts:
            if start > function.lineno:
                continue
            prompt = "\n".join(lines[start - 1 : end])
            size = len(tokenizer.encode(prompt).ids)
            if size > MAX_TOKENS or used_lines.intersection(range(start, end + 1)):
                break
            if size >= MIN_TOKENS and prompt.endswith((":", '"""', "'''", '"')):
                used_lines.update(range(start, end + 1))
                yield prompt
                break


def prompts(documents: Sequence[Document], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Prompts taken in turn from every file, so that no file dominates."""
    columns = [[{"file": d.path, "text": prompt} for prompt in _cuts(d.text, tokenizer)] for d in documents]
    in_turn = [entry for row in zip_longest(*columns) for entry in row if entry is not None]
    return in_turn[:COUNT]
