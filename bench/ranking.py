"""``specdec bench ranking``: how often the target's token is among the bundled draft's first F candidates.

Texts are sampled from the target with coupled noise, and both models are evaluated at every position. A bonus token is
searched among the first F candidates. A correction is searched among the first F after the rejected draft token is
removed. Candidates are ranked by log q + noise, as siblings and branches are, and by q.

The second table has the accepted tokens of the best trees of N nodes. The acceptance of a node is estimated from its
rank, or from its rank and the draft's confidence bucket. It is learnt on every second text and applied to the others.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.harness.command import run_benchmark
from specdec.cli.demo import MODELS
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.tree import ROOT, TokenTree
from specdec.sampling.confidence import confidence_of
from specdec.speculation.acceptance import PRIOR, AcceptanceModel

FIRST = (1, 2, 4)
NODES = (1, 2, 4, 8, 16, 32)
_MAX_DEPTH = 8
RANKINGS = ("log q + noise", "q")


@dataclass(slots=True)
class Hits:
    """How often the target's token was among the first F candidates, by (ranking, F)."""

    bonuses: dict[tuple[str, int], int] = field(default_factory=dict)
    corrections: dict[tuple[str, int], int] = field(default_factory=dict)
    num_positions: int = 0
    num_rejected: int = 0


def main(
    temperature: Annotated[list[float] | None, typer.Option(help="sampling temperature; may be repeated")] = None,
    prompts: Annotated[int, typer.Option(help="number of held-out prompts, from the first on")] = 24,
    tokens: Annotated[int, typer.Option(help="tokens sampled after each prompt")] = 64,
) -> None:
    """Compare two rankings of the draft's candidates."""
    target, draft = (_model(MODELS / role) for role in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    texts = [each["text"] for each in json.loads((MODELS / "prompts.json").read_text())][:prompts]
    table = Table(box=None, header_style="bold")
    for column in ("T", "ranked by", *(f"{what}\nF = {n}" for what in ("bonus", "correction") for n in FIRST)):
        table.add_column(column, justify="right", no_wrap=True)
    trees = Table(box=None, header_style="bold")
    for column in ("T", "acceptance by", *(f"accepted of\n{nodes} nodes" for nodes in NODES)):
        trees.add_column(column, justify="right", no_wrap=True)
    for each in temperature or [0.6, 1.0]:
        hits, learnt, guesses = Hits(), AcceptanceModel(), []
        for seed, text in enumerate(track(texts, f"T = {each:g}", transient=True)):
            ids = tokenizer.encode(text).ids
            sampled, log_q, raced = _sampled(target, draft, ids, tokens, seed, each)
            _count(hits, sampled, log_q, raced)
            right = _right(sampled, raced)
            if seed % 2:
                guesses.append(right)
            else:
                _learn(learnt, right)
        for ranking in RANKINGS:
            shares = [f"{hits.bonuses[ranking, n] / hits.num_positions:.2f}" for n in FIRST]
            shares += [f"{hits.corrections[ranking, n] / hits.num_rejected:.2f}" for n in FIRST]
            table.add_row(f"{each:g}", ranking, *shares)
        for name, levels in (("rank", False), ("rank and confidence", True)):
            accepted = _accepted(
                [[_chance(learnt, rank, confidence * levels) for rank, confidence in text] for text in guesses]
            )
            trees.add_row(f"{each:g}", name, *(f"{number:.2f}" for number in accepted))
    console = Console()
    console.print(table)
    console.print(trees)


def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)


@torch.inference_mode()
def _sampled(
    target: Any, draft: Any, ids: list[int], num_tokens: int, seed: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's sampled tokens [n], and the draft's log q [n, vocab] and log q + noise [n, vocab] there."""
    text, past, noises = list(ids), None, []
    for _ in range(num_tokens):
        output = target(torch.tensor([text if past is None else text[-1:]]), past_key_values=past, use_cache=True)
        past, logits = output.past_key_values, output.logits[0, -1].double()
        noises.append(-exponentials([Key(seed, len(text))], Domain.COUPLED, len(logits))[0].log())
        text.append(int((logits / temperature + noises[-1]).argmax()))
    read = draft(torch.tensor([text])).logits[0, len(ids) - 1 : -1].double() / temperature
    log_q = read.log_softmax(-1)
    return torch.tensor(text[len(ids) :]), log_q, log_q + torch.stack(noises)


def _count(hits: Hits, tokens: Tensor, log_q: Tensor, raced: Tensor) -> None:
    drafted = raced.argmax(-1)
    rejected = drafted != tokens
    hits.num_positions += len(tokens)
    hits.num_rejected += int(rejected.sum())
    for name, scores in zip(RANKINGS, (raced, log_q), strict=True):
        left = scores.scatter(1, drafted[:, None], -torch.inf)
        for counts, ranked, which in (
            (hits.bonuses, scores, torch.ones_like(rejected)),
            (hits.corrections, left, rejected),
        ):
            best = ranked.topk(max(FIRST)).indices == tokens[:, None]
            for first in FIRST:
                found = int((best[:, :first].any(1) & which).sum())
                counts[name, first] = counts.get((name, first), 0) + found


def _right(tokens: Tensor, raced: Tensor) -> list[tuple[int, int]]:
    """For each position, the rank of the draft's correct candidate (-1: none) and the draft's confidence bucket."""
    best = raced.topk(len(PRIOR))
    found = best.indices == tokens[:, None]
    ranks = found.int().argmax(-1).masked_fill(~found.any(-1), -1)
    return list(zip(ranks.tolist(), confidence_of(best.values).tolist(), strict=True))


def _learn(chances: AcceptanceModel, text: Sequence[tuple[int, int]]) -> None:
    size = len(PRIOR)
    for rank, confidence in text:
        guesses = TokenTree(tuple(range(size)), (ROOT,) * size, confidence=(confidence,) * size)
        chances.observe(guesses, [] if rank < 0 else [rank], ended=True)


def _chance(chances: AcceptanceModel, rank: int, confidence: int) -> float:
    return chances.at_confidence(confidence)[rank] if rank >= 0 else 0.0


def _accepted(texts: Sequence[Sequence[float]]) -> list[float]:
    """Accepted tokens per tree, for each size in NODES; ``texts`` has the probabilities of the correct candidates.

    A tree holds all nodes with a probability above a threshold. Only its correct path is known here. A node of
    probability c is on that path once in 1/c trees, so it counts as 1/c nodes.
    """
    sizes, accepted = [0.0], [0.0]
    for limit in (0.95**step for step in range(120)):
        num_nodes = num_right = 0.0
        starts = [text[start : start + _MAX_DEPTH] for text in texts for start in range(len(text) - _MAX_DEPTH)]
        for path in starts:
            for chance in itertools.takewhile(limit.__le__, itertools.accumulate(path, operator.mul)):
                num_nodes, num_right = num_nodes + 1 / chance, num_right + 1
        sizes.append(num_nodes / len(starts))
        accepted.append(num_right / len(starts))
    return [float(number) for number in numpy.interp(NODES, sizes, accepted)]


if __name__ == "__main__":
    run_benchmark(main)
