"""``python -m tests.house``: limits of the house, which keep it readable. Part of ``make check``.

How many lines a room has, how many modules, how long functions, calls, pages and sentences may be, and words that hide
what is meant. A limit is raised in the commit that needs it, with the reason; it falls with what is deleted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.checkout import ROOT

BUDGETS = {
    "specdec": 18_740,
    "orchestrator": 7_910,
    "target_service": 3_610,
    "draft_service": 2_325,
    "gateway": 4_430,
    "bench": 8_535,
    "testing": 2_690,
    "tests": 47_380,
    "models": 1_510,
}
"""Lines of code of each room, without what is generated."""

CODE = (".py", ".c", ".h", ".js", ".css", ".html")
PRODUCT = ("specdec/", "orchestrator/", "target_service/", "draft_service/", "gateway/")

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
"""Of a constructor, or fields without a default of a record."""

MAX_POSITIONAL = 3
"""Arguments of a call that have no name."""

MAX_LONG_CALLS = 103
"""Calls with more of them in the product: mostly of tensors and kernels, which take no names."""

VAGUE_NAMES = ("found", "told", "made", "some", "each", "own", "most", "least", "anew", "astray")
MAX_VAGUE_NAMES = 1550
"""Uses of such a name in code."""

MAX_ROOMS = 19
"""Entries of specdec/."""

MAX_MODULES = 12
"""Of a folder of specdec/ or orchestrator/."""

MAX_WORDS = 35
"""Of a sentence."""

MAX_VAGUE_WORDS = 30
WITH_PROSE = (".py", ".md", ".c", ".h", ".proto", ".toml", ".yml", ".yaml", ".sh", "Makefile", "Dockerfile")
TEXT = (".py", ".md", ".c", ".h", ".proto", ".toml", ".yml", ".yaml", ".sh", "Makefile", "Dockerfile")
VAGUE = re.compile(r"\b(?:nobody|somebody|whoever|whose|everybody)\b", re.IGNORECASE)

LONG_FOLDERS = {
    "specdec/backends/avx512": "a module for each kernel",
    "specdec/v1": "generated",
}

LOG = "bench/LOG.md"
MAX_LINES = {"ARCHITECTURE.md": 200, LOG: 300} | {
    str(page.relative_to(ROOT)): 120 for page in sorted((ROOT / "docs" / "design").glob("*.md"))
}
MAX_LINES_OF_DOCS = 2140
"""README, ARCHITECTURE and docs/ together."""

PROSE = ["README.md", *MAX_LINES]


def main() -> None:
    problems = [
        *(*budgets(), *rooms(), *modules(), *functions(), *vague_names()),
        *(*lengths(), *sentences(), *vague_words(), *citations()),
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(bool(problems))


def budgets() -> Iterator[str]:
    lines: Counter[str] = Counter()
    for name in tracked():
        if name.endswith(CODE) and not name.startswith("specdec/v1/"):
            lines[name.partition("/")[0]] += len(lines_of(name))
    for room, budget in BUDGETS.items():
        if lines[room] > budget:
            yield f"{room}/ has {lines[room]:,} lines, more than its budget of {budget:,}"


def functions() -> Iterator[str]:
    """Functions that are too long, and calls and constructors in which the order of values must be known by heart."""
    long_calls: Counter[str] = Counter()
    for name in tracked():
        if not name.startswith(PRODUCT) or not name.endswith(".py") or name.startswith("specdec/v1/"):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES:
                    yield f"{name}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
                parameters = len([*node.args.args, *node.args.kwonlyargs]) - 1
                if node.name == "__init__" and parameters > MAX_PARAMETERS:
                    yield f"{name}:{node.lineno} has {parameters} parameters, more than {MAX_PARAMETERS}"
            elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                required = sum(isinstance(item, ast.AnnAssign) and item.value is None for item in node.body)
                if required > MAX_PARAMETERS:
                    yield f"{name}: {node.name} has {required} fields without a default, more than {MAX_PARAMETERS}"
            elif isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                long_calls[name] += 1
    yield from limited(long_calls, MAX_LONG_CALLS, f"calls with more than {MAX_POSITIONAL} arguments without a name")


def vague_names() -> Iterator[str]:
    names: Counter[str] = Counter()
    for name in tracked():
        if name.endswith(".py") and not name.startswith("specdec/v1/"):
            tokens = tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline)
            names[name] = sum(token.type == tokenize.NAME and token.string in VAGUE_NAMES for token in tokens)
    yield from limited(names, MAX_VAGUE_NAMES, "uses of vague names")


def limited(counts: Counter[str], limit: int, what: str) -> Iterator[str]:
    if (total := counts.total()) > limit:
        worst = ", ".join(f"{name} {count}" for name, count in counts.most_common(10))
        yield f"{total} {what} (at most {limit}): {worst}"


def rooms() -> Iterator[str]:
    entries = [entry.name for entry in (ROOT / "specdec").iterdir() if "__" not in entry.name]
    if len(entries) > MAX_ROOMS:
        yield f"specdec/ has {len(entries)} entries, more than {MAX_ROOMS}: {', '.join(sorted(entries))}"


def modules() -> Iterator[str]:
    for package in ("specdec", "orchestrator"):
        for folder in (ROOT / package, *(ROOT / package).rglob("*/")):
            name = str(folder.relative_to(ROOT))
            files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
            if name not in LONG_FOLDERS and len(files) > MAX_MODULES:
                yield f"{name}/ has {len(files)} modules, more than {MAX_MODULES}"


def lengths() -> Iterator[str]:
    for name, most in MAX_LINES.items():
        if (length := len(lines_of(name))) > most:
            yield f"{name} has {length} lines, more than {most}"
    pages = ["README.md", "ARCHITECTURE.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
    if (total := sum(len(lines_of(page)) for page in pages)) > MAX_LINES_OF_DOCS:
        yield f"README, ARCHITECTURE and docs/ have {total} lines together, more than {MAX_LINES_OF_DOCS}"


def sentences() -> Iterator[str]:
    for name in PROSE:
        for sentence in prose(lines_of(name)):
            if (length := len(sentence.split())) > MAX_WORDS:
                yield f"{name}: a sentence of {length} words, more than {MAX_WORDS}: {sentence}"


def prose(lines: list[str]) -> Iterator[str]:
    """The sentences of a Markdown page, without tables, lists, headings and code."""
    paragraph: list[str] = []
    in_code = in_list = False
    for line in [*lines, ""]:
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        if not line.strip() or in_code or line.startswith(("    ", "|", "#", "!")):
            in_list = in_list and line.startswith(" ")
            yield from sentences_of(" ".join(paragraph))
            paragraph = []
        elif re.match(r"\s*(?:[-*]|\d+\.) ", line):
            in_list = True
        elif not in_list:
            paragraph.append(line.strip())


def sentences_of(paragraph: str) -> list[str]:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return [sentence for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+", text) if sentence]


def vague_words() -> Iterator[str]:
    words = Counter({name: len(VAGUE.findall(text)) for name, text in prose_files().items()})
    yield from limited(words, MAX_VAGUE_WORDS, "vague words")


def citations() -> Iterator[str]:
    """An entry of the log is cited by its date."""
    dates = {line[3:13] for line in lines_of(LOG) if line.startswith("## ")}
    for name, text in prose_files().items():
        for date in re.findall(r"bench/LOG\.md,\s+(\d{4}-\d\d-\d\d)", text):
            if date not in dates:
                yield f"{name} cites {LOG}, {date}, which has no entry"


def prose_files() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in tracked() if has_prose(name)}


@cache
def tracked() -> list[str]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (ROOT / name).is_file()]


def has_prose(name: str) -> bool:
    unread = name == "tests/house.py" or "_pb2" in name
    return name.endswith(WITH_PROSE) and not unread


def lines_of(name: str) -> list[str]:
    return Path(ROOT / name).read_text().splitlines()


if __name__ == "__main__":
    main()
