"""The Dockerfile's stages, as far as the tests ask: their instructions, with those of the stages before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.checkout import ROOT

FILE = ROOT / "deploy/docker/Dockerfile"


@dataclass(slots=True)
class Stage:
    name: str
    parent: Stage | None
    own: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of its line

    def said(self, instruction: str) -> list[str]:
        """What this instruction says here and in the stages that this one is made from, the latest last."""
        before = self.parent.said(instruction) if self.parent else []
        return before + [rest for name, rest in self.own if name == instruction]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (pair for line in self.said("ENV") for pair in line.split())
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def copied(self) -> list[tuple[str, str]]:
        """(stage or "" for the build context, what) of every COPY."""
        found = []
        for line in self.said("COPY"):
            flags = [word for word in line.split() if word.startswith("--")]
            *sources, _ = (word for word in line.split() if not word.startswith("--"))
            origin = next((flag.removeprefix("--from=") for flag in flags), "")
            found += [(origin, source) for source in sources]
        return found


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, rest in _instructions():
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            stage = found[alias] = Stage(alias, found.get(base))
        elif stage is not None:
            stage.own.append((name, rest))
    return found


def arguments() -> set[str]:
    """The names that a build may be given."""
    return {word.split("=")[0] for name, rest in _instructions() if name == "ARG" for word in rest.split()}


def _instructions() -> Iterator[tuple[str, str]]:
    lines = (line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest.strip()
