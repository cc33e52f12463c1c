"""Why a model cannot be served, in one sentence for the operator, whatever a library raised. Needs no torch."""

from __future__ import annotations

import re
from importlib.metadata import version

_CAUSES = (
    (r"(?:OutOfMemoryError|MemoryError): (.*)|(.*can't allocate memory.*)", "there is not enough memory for it: {0}"),
    (r"^(?:ImportError|ModuleNotFoundError): (.*)", "it needs a Python package that is not installed: {0}"),
    (r"^StrictDataclass.*? error for .*?Error: (.*)", "{0}"),
    (r"trust_remote_code", "it needs model code of its own, which is never run here"),
    (r"has model type (`.*?`) but", "transformers {transformers} does not know its model_type {0}"),
    (r"Unrecognized model in", "no model_type is named"),
    (r"Unrecognized configuration class.*'.*\.(\w+)'>", "transformers {transformers} knows no causal model of a {0}"),
)
"""Known causes: what an error looks like, as "type: text" in one line, and the sentence with parts of it."""

_MAX_LENGTH = 400


def in_words(error: BaseException) -> str:
    """One line without an end mark. An error of an unusual type is named, since its text alone may say little."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    line = f"{kind}: {text}" if text else kind
    for pattern, sentence in _CAUSES:
        if match := re.search(pattern, line):
            parts = [part for part in match.groups() if part is not None]
            return _cut(sentence.format(*parts, transformers=version("transformers")))
    return _cut(text if text and isinstance(error, ValueError | OSError | RuntimeError) else line)


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LENGTH else line[: _MAX_LENGTH - 1] + "…"
