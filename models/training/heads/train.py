"""Trains a head for a target on texts that the target writes, within a budget of wall-clock time.

    specdec train head --kind eagle3 --target MODEL --minutes 50 --output DIRECTORY

A third of the time the target answers questions; the rest the head learns from the answers. Each part goes on where
it was if the command ended early. A run of any length ends with a learning rate of zero.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from models.training.heads import answers as texts
from models.training.heads import questions
from models.training.heads.answers import Answer
from models.training.heads.export import Card, save
from models.training.heads.kinds import KINDS, Head
from models.training.heads.learning import Batch, Clock, Lesson, batches, lesson, padded
from models.training.optimizer import Rates, ScheduledOptimizer

ANSWER_SHARE = 0.35
HELD_OUT = 1 / 32
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)
SAVE_EVERY_S = 60.0
LOG_EVERY_S = 10.0
MAX_QUESTION = 160


@dataclass(frozen=True)
class Options:
    target: str
    output: Path
    minutes: float
    data: str
    kind: str
    device: str
    bfloat16: bool
    draft_vocab: int
    steps: int
    tied: bool
    new_tokens: int
    answers_at_once: int
    batch_tokens: int
    muon_rate: float
    adamw_rate: float


def report(line: str) -> None:
    """Print without buffering, so that a log file shows the state of the run."""
    print(line, flush=True)


def load(path: str, device: str, bfloat16: bool = False) -> tuple[Any, Any]:
    """The target and its tokenizer; in bfloat16 on a GPU or where asked for, else in float32."""
    transformers_logging.set_verbosity_error()
    dtype = torch.bfloat16 if bfloat16 or device != "cpu" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


def prompts(tokenizer: Any, model: Any, data: str, at_once: int, number: int) -> Iterator[list[list[int]]]:
    """Batches of prompts without end, from the one of this number on. Every third one of builtin data has questions
    that the model asks itself."""
    known = questions.builtin() if data == "builtin" else questions.of_file(Path(data))
    opening = questions.opening(tokenizer)
    while True:
        if data == "builtin" and number % 3 == 2:
            asked = texts.write(model, [opening] * at_once, MAX_QUESTION, 1.0)
            whole = [each.ids[each.first :] for each in asked if len(each.ids) - each.first < MAX_QUESTION]
            chosen = [text for ids in whole if (text := tokenizer.decode(ids, skip_special_tokens=True).strip())]
        else:
            start = (number - number // 3 if data == "builtin" else number) * at_once
            chosen = [known[index % len(known)] for index in range(start, start + at_once)]
        number += 1
        if chosen:
            yield [questions.as_prompt(tokenizer, question) for question in chosen]


def answered(options: Options, model: Any, tokenizer: Any) -> list[Answer]:
    """What the target answers in its share of the time, with what an earlier run left."""
    options.output.mkdir(parents=True, exist_ok=True)
    files = sorted(options.output.glob("answers-*.npz"))
    found = [answer for file in files if ".partial" not in file.name for answer in texts.load(file)]
    used = float((options.output / "answered.txt").read_text()) if files else 0.0
    clock = Clock(options.minutes * 60 * ANSWER_SHARE, used)
    number = len(files)
    source = prompts(tokenizer, model, options.data, options.answers_at_once, number)
    torch.manual_seed(number)
    while clock.progress < 1:
        written = texts.write(model, next(source), options.new_tokens, TEMPERATURES[number % len(TEMPERATURES)])
        written = [answer for answer in written if len(answer.ids) - answer.first > options.steps]
        texts.save(written, options.output / f"answers-{number:04d}.npz")
        (options.output / "answered.txt").write_text(str(clock.used))
        number, found = number + 1, found + written
        tokens = sum(len(answer.ids) - answer.first for answer in found)
        report(f"{clock.used:5.0f} s {len(found)} answers, {tokens} tokens")
    return found


def parted(found: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """The first answers, which were written greedily, and all others to other questions."""
    held_out = list(found[: max(int(len(found) * HELD_OUT), 1)])
    asked = {tuple(answer.ids[: answer.first]) for answer in held_out}
    return held_out, [answer for answer in found if tuple(answer.ids[: answer.first]) not in asked]


def drawn(training: Sequence[Answer], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The ids that the head can draw, ascending, and the share of the answers' tokens that they are."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in training:
        ids = torch.tensor(answer.ids[answer.first :])
        counts.index_add_(0, ids, torch.ones_like(ids))
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


def loss_of(head: Head, embedding: Any, batch: Batch, found: Lesson) -> Tensor:
    """Cross entropy with the target's distribution over all its tokens, of which the head can draw some: a row counts
    by the share of it that the head can draw. In nats per row."""
    length = batch.ids.shape[1]
    states = head.unroll(embedding(batch.ids[:, 1:]), found)
    total = torch.zeros((), device=batch.ids.device)
    for step, state in enumerate(states):
        rows = max(length - 2 - step, 0)
        kept = batch.is_answer[:, 2 + step :]
        last = found.last[:, 1 + step : 1 + step + rows][kept]
        wanted = (last @ head.output.T.to(last.dtype)).float() - found.scale[:, 1 + step : 1 + step + rows][kept][
            :, None
        ]
        drawn_logs = F.log_softmax(head.logits(state[:, :rows][kept]).float(), -1)
        total = total - head.DECAY**step * (wanted.exp() * drawn_logs).sum() / max(len(drawn_logs), 1)
    return total


@torch.no_grad()
def acceptance(head: Head, model: Any, held_out: Sequence[Answer], ids: Tensor, device: str) -> list[float]:
    """For each step, how often its likeliest token is the text's where all steps before were right."""
    right, asked = [0] * head.steps, [0] * head.steps
    for start in range(0, len(held_out), 8):
        batch = padded(held_out[start : start + 8], device)
        found = lesson(model, batch, head.boundaries)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            states = head.unroll(model.model.embed_tokens(batch.ids[:, 1:]), found)
            alive = torch.ones_like(batch.is_answer)
            for step, state in enumerate(states):
                rows = max(batch.ids.shape[1] - 2 - step, 0)
                guess = ids[head.logits(state[:, :rows]).argmax(-1)]
                alive = alive[:, :rows] & batch.is_answer[:, 2 + step :]
                asked[step] += int(alive.sum())
                alive = alive & (guess == batch.ids[:, 2 + step :])
                right[step] += int(alive.sum())
    return [round(good / max(all_, 1), 4) for good, all_ in zip(right, asked, strict=True)]


def learn(options: Options, head: Head, model: Any, training: Sequence[Answer]) -> int:
    """Minimise the loss until the time is used up. The number of tokens seen."""
    optimizer = ScheduledOptimizer(head, Rates(options.muon_rate, options.adamw_rate))
    state, used, seen, step = options.output / "state.pt", 0.0, 0, 0
    if state.is_file():
        kept = torch.load(state, weights_only=True, map_location=options.device)
        head.load_state_dict(kept["head"])
        optimizer.load_state_dicts(kept["optimizer"])
        used, seen = kept["used"], kept["seen"]
    clock = Clock(options.minutes * 60 * (1 - ANSWER_SHARE), used)
    logged = saved = time.monotonic()
    device_type = torch.device(options.device).type
    for batch in batches(training, options.batch_tokens, options.device, seed=seen):
        if clock.progress >= 1:
            break
        found = lesson(model, batch, head.boundaries)
        with torch.autocast(device_type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            value = loss_of(head, model.model.embed_tokens, batch, found)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step(clock.progress)
        seen, step, now = seen + int(batch.is_answer.sum()), step + 1, time.monotonic()
        if now - logged > LOG_EVERY_S:
            logged = now
            report(f"{clock.used:5.0f} s step {step} loss {float(value.detach()):.3f} {seen} tokens")
        if now - saved > SAVE_EVERY_S:
            saved = now
            kept = {"head": head.state_dict(), "optimizer": optimizer.state_dicts(), "used": clock.used, "seen": seen}
            torch.save(kept, state)
    return seen


def parse() -> Options:
    parser = argparse.ArgumentParser("specdec train head", description="Train a head on its target's own answers.")
    parser.add_argument("--target", required=True, help="directory of the checkpoint, of a model in Llama's form")
    parser.add_argument("--output", type=Path, required=True, help="directory of the head; what is there is resumed")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget")
    parser.add_argument("--data", default="builtin", help='builtin, or a file with {"prompt": "..."} on each line')
    parser.add_argument("--kind", choices=list(KINDS), default="eagle3", help="what to train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--bfloat16", action="store_true", help="also on a CPU: faster where it has instructions")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="number of tokens that the head can draw")
    parser.add_argument("--steps", type=int, help="tokens that it learns to draft in a row; of medusa, its heads")
    parser.add_argument("--tied", action="store_true", help="leave out the output's rows, which are the target's")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--answers-at-once", type=int, help="texts in one batch of the target")
    parser.add_argument("--batch-tokens", type=int, help="tokens in one batch of the head")
    parser.add_argument("--muon-rate", type=float, default=0.03)
    parser.add_argument("--adamw-rate", type=float, default=0.004)
    found = parser.parse_args()
    found.steps = found.steps or KINDS[found.kind].STEPS
    on_cpu = torch.device(found.device).type == "cpu"
    found.answers_at_once = found.answers_at_once or (64 if on_cpu else 4096)
    found.batch_tokens = found.batch_tokens or (2048 if on_cpu else 24576)
    return Options(**vars(found))


def main() -> None:
    options = parse()
    started = time.monotonic()
    model, tokenizer = load(options.target, options.device, options.bfloat16)
    found = answered(options, model, tokenizer)
    held_out, training = parted(found)
    ids, share = drawn(training, options.draft_vocab, model.config.vocab_size)
    report(f"the head can draw {len(ids)} tokens, {share:.3f} of those of the answers")
    torch.manual_seed(1)
    ids = ids.to(options.device)
    head = KINDS[options.kind](model.config, model.lm_head.weight[ids].detach().clone(), options.steps)
    head.to(options.device).start_from(model)
    seen = learn(options, head, model, training)
    accepted = acceptance(head, model, held_out[:512], ids, options.device)
    card = Card(
        title=head.TITLE,
        target=Path(options.target).name,
        data=options.data,
        minutes=options.minutes,
        device=torch.cuda.get_device_name() if options.device != "cpu" else "CPU",
        answers=len(training),
        tokens=sum(len(answer.ids) - answer.first for answer in training),
        tokens_seen=seen,
        share=round(share, 4),
        acceptance=accepted,
    )
    save(head, model.config, ids, card, options.output, options.tied)
    report(json.dumps({**asdict(card), "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
