"""Trains a small draft model on texts, best those that a target wrote for its head (models.training.heads.train).

    specdec train draft --target MODEL --answers DIRECTORY --minutes 30 --output DIRECTORY

It minimises the divergence from the target's next-token distribution, because acceptance depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.training import texts
from models.training.loop import Flags, load, parser_of, report, train
from models.training.texts import Batch, Text, padded

_ROWS_AT_ONCE = 2048
HEAD_SIZE = 64

RowLoss = Callable[[Tensor, slice], Tensor]
"""The sum of a loss over some rows of a batch, of their logits [rows, vocabulary]."""


class DraftFlags(Flags):
    target: str
    answers: Path
    hidden: int
    layers: int
    feed_forward: int


def new_model(hidden: int, layers: int, feed_forward: int, **of_vocabulary: Any) -> LlamaForCausalLM:
    """A freshly initialised model."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        tie_word_embeddings=True,
        pad_token_id=None,
        **of_vocabulary,
    )
    return LlamaForCausalLM(config)


def new_draft(target: Any, flags: DraftFlags) -> LlamaForCausalLM:
    """A model with the target's vocabulary and end tokens. Its embedding are the principal directions of the target's.

    The scale is that of a random initialisation. The square root reduces the differences between the directions.
    """
    names = ("vocab_size", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id")
    of_vocabulary = {name: getattr(target.config, name) for name in names}
    draft = new_model(flags.hidden, flags.layers, flags.feed_forward, **of_vocabulary)
    draft.generation_config = target.generation_config
    with torch.no_grad():
        left, singular, _ = torch.linalg.svd(target.model.embed_tokens.weight.float().cpu(), full_matrices=False)
        projected = left[:, : flags.hidden] * singular[: flags.hidden].sqrt()
        scale = draft.config.initializer_range / projected.square().mean().sqrt()
        draft.model.embed_tokens.weight.copy_(projected * scale)
    return draft


def states_before_answers(model: Any, batch: Batch) -> Tensor:
    """The last states of the positions that an answer's token follows, [rows, d]."""
    states: Tensor = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return states[batch.is_followed]


def add_gradients(model: Any, batch: Batch, row_loss: RowLoss) -> Tensor:
    """Adds the gradients of the mean of a loss, and returns it. The logits of all rows would not fit at once."""
    states = states_before_answers(model, batch)
    cut, total = states.detach().requires_grad_(), torch.zeros((), device=states.device)
    for start in range(0, len(cut), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        loss = row_loss(model.lm_head(cut[rows]).float(), rows) / len(cut)
        torch.autograd.backward(loss)
        total += loss.detach()
    states.backward(cut.grad)
    return total


def divergence(target: Any, batch: Batch) -> RowLoss:
    """From the target's distribution, in nats."""
    with torch.no_grad():
        states = states_before_answers(target, batch)

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            target_logs = F.log_softmax(target.lm_head(states[rows]).float(), -1)
        return F.kl_div(F.log_softmax(logits, -1), target_logs, reduction="sum", log_target=True)

    return row_loss


@torch.no_grad()
def agreement(draft: Any, held_out: Sequence[Text], flags: Flags) -> float:
    """How often the draft's most likely token is the text's."""
    num_right = num_tokens = 0
    for start in range(0, len(held_out), 8):
        batch = padded(held_out[start : start + 8], flags.device)
        with flags.autocast():
            predictions = draft.lm_head(states_before_answers(draft, batch)).argmax(-1)
        num_right += int((predictions == batch.ids[batch.is_answer]).sum())
        num_tokens += len(predictions)
    return num_right / max(num_tokens, 1)


def parse() -> DraftFlags:
    parser = parser_of("specdec train draft", "Train a draft on its target's answers.", 0.025, 0.006)
    parser.add_argument("--target", required=True, help="directory of the checkpoint")
    parser.add_argument("--answers", type=Path, required=True, help="directory of answers-*.npz")
    parser.add_argument("--hidden", type=int, default=192, help=f"size of a state, a multiple of {HEAD_SIZE}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--feed-forward", type=int, default=640)
    parser.set_defaults(batch_tokens=16384)
    return parser.parse_args(namespace=DraftFlags())


def main() -> None:
    flags = parse()
    target, tokenizer = load(flags.target, flags)
    held_out, training = texts.split(texts.load(flags.answers))
    draft: Any = new_draft(target, flags).to(flags.device)
    report(f"{draft.num_parameters()} parameters, {len(training)} texts")

    def learn(batch: Batch) -> Tensor:
        with flags.autocast():
            return add_gradients(draft, batch, divergence(target, batch))

    num_tokens = train(draft, training, learn, flags=flags, seconds=flags.minutes * 60)
    draft.bfloat16().save_pretrained(flags.output)
    tokenizer.save_pretrained(flags.output)
    rate = agreement(draft.float(), held_out[:512], flags)
    report(json.dumps({"tokens": num_tokens, "agreement": round(rate, 4), "parameters": draft.num_parameters()}))


if __name__ == "__main__":
    main()
