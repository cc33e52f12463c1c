"""Trains a head for a target on texts that the target writes, within a budget of wall-clock time.

    specdec train head --kind eagle3 --target MODEL --minutes 50 --output DIRECTORY

A third of the time the target answers questions; the rest the head learns from the answers. Each part continues where
it was if the command ended early.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.training import texts
from models.training.heads.answers import write_within
from models.training.heads.base import Head, Lesson, lesson
from models.training.heads.eagle3 import Eagle3
from models.training.heads.export import Card, save
from models.training.heads.medusa import Medusa
from models.training.heads.questions import Prompts
from models.training.heads.redrafter import ReDrafter
from models.training.loop import Flags, load, parser_of, report, train
from models.training.texts import Batch, Text, padded

KINDS: dict[str, type[Eagle3] | type[Medusa] | type[ReDrafter]] = {
    "eagle3": Eagle3,
    "medusa": Medusa,
    "redrafter": ReDrafter,
}
ANSWER_SHARE = 0.35


class HeadFlags(Flags):
    target: str
    data: str
    kind: str
    draft_vocab: int
    steps: int
    tied: bool
    new_tokens: int
    answers_at_once: int


def drawable(training: Sequence[Text], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The ids that the head can draw, ascending, and the share of the answers' tokens that they are."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in training:
        ids = torch.tensor(text.answer)
        counts.index_add_(0, ids, torch.ones_like(ids))
    ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return ids, float(counts[ids].sum() / counts.sum())


def loss_of(head: Head, embedding: Any, batch: Batch, given: Lesson) -> Tensor:
    """Cross entropy with the target's distribution over all its tokens, of which the head can draw a part: a row counts
    by the share of the distribution that the head can draw. In nats per row."""
    length = batch.ids.shape[1]
    states = head.unroll(embedding(batch.ids[:, 1:]), given)
    total = torch.zeros((), device=batch.ids.device)
    for step, state in enumerate(states):
        rows = max(length - 2 - step, 0)
        kept = batch.is_answer[:, 2 + step :]
        before = slice(1 + step, 1 + step + rows)
        last, scale = given.last[:, before][kept], given.scale[:, before][kept]
        target_logs = (last @ head.output.T.to(last.dtype)).float() - scale[:, None]
        head_logs = F.log_softmax(head.logits(state[:, :rows][kept]).float(), -1)
        total = total - head.DECAY**step * (target_logs.exp() * head_logs).sum() / max(len(head_logs), 1)
    return total


@torch.no_grad()
def acceptance(head: Head, model: Any, held_out: Sequence[Text], ids: Tensor, flags: Flags) -> list[float]:
    """For each step, how often its most likely token is the text's where all steps before were right."""
    num_right, num_tokens = [0] * head.steps, [0] * head.steps
    for start in range(0, len(held_out), 8):
        batch = padded(held_out[start : start + 8], flags.device)
        given = lesson(model, batch, head.boundaries)
        with flags.autocast():
            states = head.unroll(model.model.embed_tokens(batch.ids[:, 1:]), given)
            alive = torch.ones_like(batch.is_answer)
            for step, state in enumerate(states):
                rows = max(batch.ids.shape[1] - 2 - step, 0)
                predictions = ids[head.logits(state[:, :rows]).argmax(-1)]
                alive = alive[:, :rows] & batch.is_answer[:, 2 + step :]
                num_tokens[step] += int(alive.sum())
                alive = alive & (predictions == batch.ids[:, 2 + step :])
                num_right[step] += int(alive.sum())
    return [round(right / max(tokens, 1), 4) for right, tokens in zip(num_right, num_tokens, strict=True)]


def parse() -> HeadFlags:
    parser = parser_of("specdec train head", "Train a head on its target's answers.", 0.03, 0.004)
    parser.add_argument("--target", required=True, help="directory of the checkpoint, of a model in Llama's form")
    parser.add_argument("--data", default="builtin", help='builtin, or a file with {"prompt": "..."} on each line')
    parser.add_argument("--kind", choices=list(KINDS), default="eagle3", help="what to train")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="number of tokens that the head can draw")
    parser.add_argument("--steps", type=int, help="tokens that it learns to draft in a row; of medusa, its heads")
    parser.add_argument("--tied", action="store_true", help="leave out the output's rows, which are the target's")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--answers-at-once", type=int, help="texts in one batch of the target")
    flags = parser.parse_args(namespace=HeadFlags())
    on_cpu = torch.device(flags.device).type == "cpu"
    flags.steps = flags.steps or KINDS[flags.kind].STEPS
    flags.answers_at_once = flags.answers_at_once or (64 if on_cpu else 4096)
    flags.batch_tokens = flags.batch_tokens or (2048 if on_cpu else 24576)
    return flags


def main() -> None:
    flags = parse()
    started = time.monotonic()
    seconds = flags.minutes * 60
    model, tokenizer = load(flags.target, flags)
    answers = write_within(
        seconds * ANSWER_SHARE,
        model,
        Prompts(model, tokenizer, flags.data, flags.answers_at_once).batches,
        directory=flags.output,
        min_tokens=flags.steps + 1,
        max_tokens=flags.new_tokens,
    )
    held_out, training = texts.split(answers)
    ids, share = drawable(training, flags.draft_vocab, model.config.vocab_size)
    report(f"the head can draw {len(ids)} tokens, {share:.3f} of those of the answers")
    torch.manual_seed(1)
    ids = ids.to(flags.device)
    head: Head = KINDS[flags.kind](model.config, model.lm_head.weight[ids].detach().clone(), flags.steps)
    head.to(flags.device).start_from(model)

    def add_gradients(batch: Batch) -> Tensor:
        given = lesson(model, batch, head.boundaries)
        with flags.autocast():
            loss = loss_of(head, model.model.embed_tokens, batch, given)
        torch.autograd.backward(loss)
        return loss.detach()

    state = flags.output / "state.pt"
    num_tokens = train(head, training, add_gradients, flags=flags, seconds=seconds * (1 - ANSWER_SHARE), state=state)
    card = Card(
        title=head.TITLE,
        target=Path(flags.target).name,
        data=flags.data,
        minutes=flags.minutes,
        device=torch.cuda.get_device_name() if flags.device != "cpu" else "CPU",
        answers=len(training),
        tokens=sum(len(text.answer) for text in training),
        tokens_seen=num_tokens,
        share=round(share, 4),
        acceptance=acceptance(head, model, held_out[:512], ids, flags),
    )
    save(head, model.config, ids, card=card, directory=flags.output, tied=flags.tied)
    report(json.dumps({**asdict(card), "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
