"""``python -m tests.house``: limits of the house, which keep it readable. Part of ``make check``.

How many rooms and modules there are, how long pages and sentences may be, and words that hide what is meant.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.checkout import ROOT

MAX_ROOMS = 18
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
MAX_LINES_OF_DOCS = 1960
"""README, ARCHITECTURE and docs/ together."""

PROSE = ["README.md", *MAX_LINES]


def main() -> None:
    problems = [*rooms(), *modules(), *lengths(), *sentences(), *vague_words(), *citations()]
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(bool(problems))


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
    found = {name: len(VAGUE.findall(text)) for name, text in prose_files().items()}
    if (total := sum(found.values())) > MAX_VAGUE_WORDS:
        worst = sorted(found, key=found.__getitem__, reverse=True)[:10]
        yield f"{total} vague words (at most {MAX_VAGUE_WORDS}): {', '.join(f'{name} {found[name]}' for name in worst)}"


def citations() -> Iterator[str]:
    """An entry of the log is cited by its date."""
    dates = {line[3:13] for line in lines_of(LOG) if line.startswith("## ")}
    for name, text in prose_files().items():
        for date in re.findall(r"bench/LOG\.md,\s+(\d{4}-\d\d-\d\d)", text):
            if date not in dates:
                yield f"{name} cites {LOG}, {date}, which has no entry"


def prose_files() -> dict[str, str]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {name: (ROOT / name).read_text() for name in names if has_prose(name) and (ROOT / name).exists()}


def has_prose(name: str) -> bool:
    unread = name == "tests/house.py" or "_pb2" in name
    return name.endswith(WITH_PROSE) and not unread


def lines_of(name: str) -> list[str]:
    return Path(ROOT / name).read_text().splitlines()


if __name__ == "__main__":
    main()
