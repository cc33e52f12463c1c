"""Computes the held-out loss of both models, and the acceptance of the draft's proposals.

    python -m models.training.evaluate --json models/demo/evaluation.json

Acceptance depends on the text, so it is measured on three texts: held-out files, the target's greedy
continuations of the demo prompts, and its sampled continuations at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training import agreement, architecture, batches, corpus
from models.training import tokenizer as bpe
from models.training.generation import generate

DEMO = Path(__file__).resolve().parent.parent / "demo"
WINDOW = 512
AGREEMENT_WINDOWS = 64
NEW_TOKENS = 128

Measure = Callable[[Tensor, Tensor], Tensor]
MEASURES: dict[str, Measure] = {
    "greedy": agreement.greedy,
    "overlap": agreement.overlap,
    "coupled": agreement.coupled,
}


@dataclass(frozen=True)
class Pair:
    """Both models and the tokenizer they share."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Passage:
    """Token ids. The models predict those from position ``first`` on."""

    ids: list[int]
    first: int


def load(directory: Path) -> Pair:
    """Load the pair that is saved in a directory."""
    return Pair(
        target=architecture.load(directory / "target"),
        draft=architecture.load(directory / "draft"),
        tokenizer=bpe.load(directory / "target"),
    )


def _predictions(model: LlamaForCausalLM, passage: Passage) -> Tensor:
    rows: Tensor = model(input_ids=torch.tensor([passage.ids[:-1]]), use_cache=False).logits[0]
    return rows[passage.first - 1 :]


def loss(model: LlamaForCausalLM, stream: corpus.TokenStream) -> float:
    """Cross entropy over the stream in windows of 512 tokens, in nats per token."""
    values = []
    for window in batches.evaluation_batches(stream, rows=1, length=WINDOW):
        passage = Passage(window[0].tolist(), first=1)
        wanted = window[0, 1:]
        values.append(float(torch.nn.functional.cross_entropy(_predictions(model, passage), wanted)))
    return fmean(values)


def held_out_passages(stream: corpus.TokenStream, count: int) -> list[Passage]:
    """Windows spread evenly over the held-out stream."""
    every = [Passage(w[0].tolist(), 1) for w in batches.evaluation_batches(stream, 1, WINDOW)]
    stride = max(len(every) // count, 1)
    return every[::stride][:count]


def continuations(pair: Pair, prompts: list[str], *, sampled: bool) -> list[Passage]:
    """The target's continuation of each prompt, greedy or sampled at temperature 1."""
    end = bpe.end_of_text(pair.tokenizer)
    generator = torch.Generator().manual_seed(0) if sampled else None
    passages = []
    for prompt in prompts:
        ids = pair.tokenizer.encode(prompt).ids
        written = generate(pair.target, ids, NEW_TOKENS, end, generator)
        passages.append(Passage(ids + written, first=len(ids)))
    return passages


def acceptance(pair: Pair, passages: list[Passage]) -> dict[str, float]:
    """The mean of every measure over all predicted positions of the passages, and the number of positions."""
    values: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    for passage in passages:
        target, draft = _predictions(pair.target, passage), _predictions(pair.draft, passage)
        for name, measure in MEASURES.items():
            values[name].append(measure(target, draft))
    means = {name: round(float(torch.cat(parts).mean()), 4) for name, parts in values.items()}
    return {**means, "positions": sum(len(part) for part in values["greedy"])}


@torch.no_grad()
def evaluate(directory: Path) -> dict[str, object]:
    """All figures of the model card."""
    pair = load(directory)
    prompts = [entry["text"] for entry in json.loads((directory / "prompts.json").read_text())]
    stream = corpus.encode(corpus.load().held_out, pair.tokenizer)
    texts = {
        "held-out files": held_out_passages(stream, AGREEMENT_WINDOWS),
        "greedy continuations": continuations(pair, prompts, sampled=False),
        "sampled continuations": continuations(pair, prompts, sampled=True),
    }
    return {
        "parameters": {
            "target": architecture.parameters(pair.target),
            "draft": architecture.parameters(pair.draft),
        },
        "held_out_tokens": len(stream),
        "held_out_loss": {
            "target": round(loss(pair.target, stream), 4),
            "draft": round(loss(pair.draft, stream), 4),
        },
        "acceptance": {name: acceptance(pair, passages) for name, passages in texts.items()},
    }


def table(acceptances: dict[str, dict[str, float]]) -> str:
    """The acceptance figures as a Markdown table."""
    rows = ["| text | greedy | 1 - TV | coupled |", "|---|---|---|---|"]
    for name, row in acceptances.items():
        rows.append(f"| {name} | " + " | ".join(f"{row[measure]:.3f}" for measure in MEASURES) + " |")
    return "\n".join(rows)


def main() -> None:
    """Evaluate the pair, and print a table and the figures as JSON."""
    parser = argparse.ArgumentParser(description="Evaluate the demo pair.")
    parser.add_argument("--pair", type=Path, default=DEMO, help="directory of the pair")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; more than 1 gains nothing here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = evaluate(options.pair)
    acceptances = figures["acceptance"]
    assert isinstance(acceptances, dict)
    print(table(acceptances))
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
