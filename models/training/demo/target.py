"""Trains a target or a draft for it on the CPU, within a budget of wall-clock time.

    python -m models.training.train target --minutes 56
    python -m models.training.train draft --minutes 19

The target learns from the text. The draft learns from the target: it minimises the divergence between
the target's next-token distribution and its own, because acceptance depends on it. The learning rate
falls to zero exactly at the end of the budget, so a run of any length ends annealed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training import architecture, batches, corpus
from models.training import tokenizer as bpe
from models.training.optimizer import Rates, ScheduledOptimizer

DEMO = Path(__file__).resolve().parent.parent / "demo"
BATCH_TOKENS = 6144
LOG_EVERY = 50
CHECK_EVERY = 300
CHECK_TOKENS = 20_000

LossFunction = Callable[[Tensor], Tensor]


def report(line: str) -> None:
    """Print without buffering, so that a log file shows the state of the run."""
    print(line, flush=True)


def logits(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """Logits of all positions of the windows except the last, [windows * length, vocabulary], float32."""
    with torch.autocast("cpu", torch.bfloat16):
        rows: Tensor = model(input_ids=window[:, :-1], use_cache=False).logits
    return rows.float().flatten(0, 1)


def text_loss(model: LlamaForCausalLM) -> LossFunction:
    """Cross entropy with the text, in nats per token."""

    def loss(window: Tensor) -> Tensor:
        return F.cross_entropy(logits(model, window), window[:, 1:].flatten())

    return loss


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> LossFunction:
    """Forward divergence of the draft from the target, over the whole vocabulary, in nats per token."""
    target.requires_grad_(False)

    def loss(window: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(logits(target, window), dim=-1)
        got = F.log_softmax(logits(draft, window), dim=-1)
        return F.kl_div(got, wanted, reduction="batchmean", log_target=True)

    return loss


def prepare_tokenizer(directory: Path, documents: corpus.Split, fit: bool) -> Tokenizer:
    """Train the tokenizer on the training documents (``fit``), or load the target's tokenizer."""
    if fit:
        return bpe.train(document.text for document in documents.train)
    return bpe.load(directory / "target")


@torch.no_grad()
def mean_loss(loss: LossFunction, stream: corpus.TokenStream, rows: int = 16) -> float:
    """The mean of a loss over the whole stream."""
    total, count = 0.0, 0
    for window in batches.evaluation_batches(stream, rows):
        total += float(loss(window)) * len(window)
        count += len(window)
    return total / count


def optimise(
    model: LlamaForCausalLM,
    loss: LossFunction,
    stream: corpus.TokenStream,
    *,
    minutes: float,
    rates: Rates,
    check: Callable[[], float],
) -> int:
    """Minimise the loss until the time budget is used up. The number of steps."""
    compiled = torch.compile(loss, dynamic=False)
    optimizer = ScheduledOptimizer(model, rates)
    started, step = time.monotonic(), 0
    for window in batches.training_batches(stream, BATCH_TOKENS, seed=1):
        progress = (time.monotonic() - started) / (minutes * 60)
        if progress >= 1:
            break
        value = compiled(window)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(progress)
        step += 1
        if step % LOG_EVERY == 0:
            elapsed = time.monotonic() - started
            rate = step * BATCH_TOKENS / elapsed
            report(f"step {step} {elapsed:.0f} s loss {float(value.detach()):.4f} {rate:.0f} tokens/s")
        if step % CHECK_EVERY == 0:
            report(f"step {step} held-out loss {check():.4f}")
    return step


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train one model of the demo pair.")
    parser.add_argument("model", choices=sorted(architecture.SHAPES))
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget of the training loop")
    parser.add_argument("--output", type=Path, default=DEMO, help="directory of the pair")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-rate", type=float, default=Rates.muon)
    parser.add_argument("--adamw-rate", type=float, default=Rates.adamw)
    return parser.parse_args()


def main() -> None:
    """Train a model, save it and evaluate it on the held-out files."""
    options = parse()
    torch.set_num_threads(options.threads)
    documents = corpus.load()
    tokenizer = prepare_tokenizer(options.output, documents, fit=options.model == "target")
    stream = corpus.encode(documents.train, tokenizer)
    held_out = corpus.encode(documents.held_out, tokenizer)
    model = architecture.build(options.model, bpe.end_of_text(tokenizer), seed=1)
    report(f"{architecture.parameters(model)} parameters, {len(stream)} training tokens")
    if options.model == "target":
        loss = text_loss(model)
    else:
        target = architecture.load(options.output / "target")
        architecture.project_embedding(model, target)
        loss = distillation_loss(model, target)
    rates = Rates(muon=options.muon_rate, adamw=options.adamw_rate)
    steps = optimise(
        model,
        loss,
        stream,
        minutes=options.minutes,
        rates=rates,
        check=lambda: mean_loss(loss, held_out[:CHECK_TOKENS]),
    )
    architecture.save(model, tokenizer, options.output / options.model)
    summary = {
        "model": options.model,
        "minutes": options.minutes,
        "steps": steps,
        "tokens": steps * BATCH_TOKENS,
        "held_out_tokens": len(held_out),
        "held_out_loss": mean_loss(text_loss(model), held_out),
    }
    report(json.dumps(summary))


if __name__ == "__main__":
    main()
