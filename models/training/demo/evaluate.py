"""Computes the held-out loss of the demo pair, and the acceptance of the draft's proposals.

    python -m models.training.demo.evaluate models/demo

Writes evaluation.json there. Acceptance depends on the text, so it is measured on three texts: held-out files, the
target's greedy continuations of the demo prompts, and its sampled continuations at temperature 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.training.demo import corpus
from models.training.heads.answers import write
from models.training.texts import Text

ACCEPTANCE_WINDOWS = 64
NEW_TOKENS = 128


def greedy(target: Tensor, draft: Tensor) -> Tensor:
    """1 where both models have the same most likely token, else 0: acceptance at temperature 0."""
    return (target.argmax(-1) == draft.argmax(-1)).double()


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Sum over tokens of min(p, q): acceptance of rejection sampling at temperature 1."""
    return torch.minimum(target.double().softmax(-1), draft.double().softmax(-1)).sum(-1)


def coupled(target: Tensor, draft: Tensor) -> Tensor:
    """Probability at temperature 1 that two exponential races with shared random numbers have the same winner.

    The probability that token i wins both races is 1 / sum_j max(p_j / p_i, q_j / q_i). In the order of the ratio
    p / q, the tokens after i contribute p_j / p_i and the others q_j / q_i. So one sort and two cumulative sums give
    all terms.
    """
    log_p, log_q = target.double().log_softmax(-1), draft.double().log_softmax(-1)
    order = (log_p - log_q).argsort(-1)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    p_after = (p.flip(-1).cumsum(-1).flip(-1) - p).clamp_min(0)
    q_until = q.cumsum(-1)
    tiny = torch.finfo(torch.float64).tiny
    return (1 / (p_after / p.clamp_min(tiny) + q_until / q.clamp_min(tiny))).sum(-1)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"greedy": greedy, "overlap": overlap, "coupled": coupled}
"""Of the logits of both models, [positions, vocabulary]; one value per position."""


def _predictions(model: Any, text: Text) -> Tensor:
    """The logits before each token of the answer, [tokens, vocabulary]."""
    logits: Tensor = model(input_ids=torch.tensor([text.ids[:-1]]), use_cache=False).logits[0]
    return logits[text.first - 1 :]


def loss(model: Any, texts: Sequence[Text]) -> float:
    """Cross entropy with the texts, in nats per token."""
    return fmean(float(F.cross_entropy(_predictions(model, text), torch.tensor(text.answer))) for text in texts)


def acceptance(target: Any, draft: Any, texts: Sequence[Text]) -> dict[str, float]:
    """The mean of every measure over all predicted positions of the texts, and their number."""
    values: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    for text in texts:
        logits = _predictions(target, text), _predictions(draft, text)
        for name, measure in MEASURES.items():
            values[name].append(measure(*logits))
    means = {name: round(float(torch.cat(parts).mean()), 4) for name, parts in values.items()}
    return {**means, "positions": sum(len(text.answer) for text in texts)}


@torch.no_grad()
def evaluate(directory: Path) -> dict[str, object]:
    """All figures of the model card."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32) for name in ("target", "draft")
    )
    tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "target" / "tokenizer.json"))
    prompts = [tokenizer.encode(entry["text"]).ids for entry in json.loads((directory / "prompts.json").read_text())]
    held_out = corpus.windows(corpus.load()[1], tokenizer, first=1)
    torch.manual_seed(0)
    texts = {
        "held-out files": held_out[:: max(len(held_out) // ACCEPTANCE_WINDOWS, 1)][:ACCEPTANCE_WINDOWS],
        "greedy continuations": write(target, prompts, NEW_TOKENS, 0.0),
        "sampled continuations": write(target, prompts, NEW_TOKENS, 1.0),
    }
    return {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "held_out_loss": {"target": round(loss(target, held_out), 4), "draft": round(loss(draft, held_out), 4)},
        "acceptance": {name: acceptance(target, draft, part) for name, part in texts.items()},
    }


def main() -> None:
    directory = Path(sys.argv[1])
    figures = json.dumps(evaluate(directory), indent=1)
    (directory / "evaluation.json").write_text(figures + "\n")
    print(figures)


if __name__ == "__main__":
    main()
