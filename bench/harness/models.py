"""The models of a benchmark: those that a user names, or a pair by its name. Does not know what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.models.damped_pair import damped_pair
from specdec.cli.demo import MODELS
from specdec.cli.fetch import SmolLm2
from specdec.cli.processes import StartError


class PairName(StrEnum):
    smollm2 = "smollm2"
    demo = "demo"
    damped = "damped"
    table = "table"


_LABELS = {
    PairName.smollm2: "SmolLM2-135M-Instruct",
    PairName.demo: "demo pair: small models of Python source",
    PairName.damped: "damped pair: random weights, a model of costs and not of text",
    PairName.table: "table models: passes that sleep",
}


@dataclass(frozen=True, slots=True)
class Models:
    """A target, and what drafts for it: checkpoints (directories or hub ids), and directories of heads."""

    label: str
    target: str
    drafts: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    is_random: bool = False
    """Whether the weights are random, so that text is no better than random ids."""

    @property
    def draft(self) -> str:
        """The first one. Raises StartError if there is none."""
        if not self.drafts:
            raise StartError("this needs a draft model: --draft")
        return self.drafts[0]


def pair_of(name: PairName, directory: Path) -> Models:
    """The models of a pair. The damped one is made in ``directory``, which takes some seconds.

    Raises StartError for tables, which are no models, and for a pair that must be fetched first.
    """
    if name is PairName.table:
        raise StartError("table models have no text: they are for bench load, bench never-slower and bench distance")
    if name is PairName.damped:
        pair = damped_pair(directory)
        return Models(_LABELS[name], str(pair.target), (str(pair.draft),), is_random=True)
    if name is PairName.demo:
        return Models(_LABELS[name], str(MODELS / "target"), (str(MODELS / "draft"),))
    fetched = SmolLm2.in_cache()
    if not fetched.is_there:
        raise StartError(f"there is no {fetched.target}: `specdec fetch smollm2` makes it; or name yours with --target")
    heads = (fetched.head, *(fetched.head.with_name(name) for name in ("medusa", "redrafter")))
    trained = tuple(str(head) for head in heads if head.is_dir())
    return Models(_LABELS[name], str(fetched.target), (str(fetched.draft),), trained)


def label_of(name: PairName) -> str:
    return _LABELS[name]


def named(models: Sequence[str]) -> Mapping[str, str]:
    """Models by the names of their folders, or by their whole paths where two folders have one name."""
    names = [Path(model).name for model in models]
    return {name if names.count(name) == 1 else model: model for name, model in zip(names, models, strict=True)}
