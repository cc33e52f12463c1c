"""``specdec bench ranking``: how often the target's token is among the bundled draft's likeliest, by their ranking.

Texts are sampled from the target with coupled noise, and both models are read at every position. A token that follows
the last node in flight is looked for among the draft's first F; a correction among the first F that are left once the
token that was drafted, and rejected, is taken away. Ranked by log q + noise, as siblings and branches are; and by q.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.demo import MODELS
from specdec.noise import Domain, Key, exponentials

FIRST = (1, 2, 4)
RANKINGS = ("log q + noise", "q")


@dataclass(slots=True)
class Hits:
    """By (ranking, F): how often the target's token was among the first F."""

    bonuses: dict[tuple[str, int], int] = field(default_factory=dict)
    corrections: dict[tuple[str, int], int] = field(default_factory=dict)
    num_positions: int = 0
    num_rejected: int = 0


def main(
    temperature: Annotated[list[float] | None, typer.Option(help="may be repeated")] = None,
    prompts: Annotated[int, typer.Option(help="held-out ones, from the first on")] = 24,
    tokens: Annotated[int, typer.Option(help="sampled after each")] = 64,
) -> None:
    """Compare two rankings of the draft's guesses."""
    target, draft = (_model(MODELS / role) for role in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    texts = [each["text"] for each in json.loads((MODELS / "prompts.json").read_text())][:prompts]
    table = Table(box=None, header_style="bold")
    for column in ("T", "ranked by", *(f"{what}\nF = {n}" for what in ("bonus", "correction") for n in FIRST)):
        table.add_column(column, justify="right", no_wrap=True)
    for each in temperature or [0.6, 1.0]:
        hits = Hits()
        for seed, text in enumerate(track(texts, f"T = {each:g}", transient=True)):
            ids = tokenizer.encode(text).ids
            _count(hits, *_sampled(target, draft, ids, tokens, seed, each))
        for ranking in RANKINGS:
            shares = [f"{hits.bonuses[ranking, n] / hits.num_positions:.2f}" for n in FIRST]
            shares += [f"{hits.corrections[ranking, n] / hits.num_rejected:.2f}" for n in FIRST]
            table.add_row(f"{each:g}", ranking, *shares)
    Console().print(table)


def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)


@torch.inference_mode()
def _sampled(
    target: Any, draft: Any, ids: list[int], num_tokens: int, seed: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's tokens [n], and at their positions the draft's log q [n, vocab] and log q + noise [n, vocab]."""
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


if __name__ == "__main__":
    typer.run(main)
