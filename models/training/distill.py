"""Trains a small draft model on the answers that a target wrote for its head (models.training.heads.train).

    specdec train draft --target MODEL --answers DIRECTORY --minutes 30 --output DIRECTORY

It minimises the divergence from the target's next-token distribution, because acceptance depends on it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.training.architecture import parameters, project_embedding
from models.training.heads import answers as texts
from models.training.heads.answers import Answer
from models.training.heads.learning import Batch, Clock, batches, padded
from models.training.heads.train import LOG_EVERY_S, load, parted, report
from models.training.optimizer import Rates, ScheduledOptimizer

_ROWS_AT_ONCE = 2048


def small(target: Any, hidden: int, layers: int, feed_forward: int) -> LlamaForCausalLM:
    """A model with the target's vocabulary and end tokens, freshly initialised."""
    torch.manual_seed(1)
    theirs = target.config
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters=theirs.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = target.generation_config
    return model


def states_before_answers(model: Any, batch: Batch) -> Tensor:
    """The last states of the positions that an answer's token follows, [rows, d]."""
    followed = torch.zeros_like(batch.is_answer)
    followed[:, :-1] = batch.is_answer[:, 1:]
    states: Tensor = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return states[followed]


def learned(draft: Any, target: Any, batch: Batch) -> float:
    """Adds the gradients of a batch; the divergence in nats per token. The logits of all rows would not fit at once."""
    with torch.no_grad():
        theirs = states_before_answers(target, batch)
    states = states_before_answers(draft, batch)
    cut, total = states.detach().requires_grad_(), 0.0
    for start in range(0, len(cut), _ROWS_AT_ONCE):
        with torch.no_grad():
            wanted = F.log_softmax(target.lm_head(theirs[start : start + _ROWS_AT_ONCE]).float(), -1)
        got = F.log_softmax(draft.lm_head(cut[start : start + _ROWS_AT_ONCE]).float(), -1)
        value = F.kl_div(got, wanted, reduction="sum", log_target=True) / len(cut)
        torch.autograd.backward(value)
        total += float(value.detach())
    states.backward(cut.grad)
    return total


@torch.no_grad()
def agreement(draft: Any, held_out: Sequence[Answer], device: str) -> float:
    """How often the draft's likeliest token is the text's."""
    right = asked = 0
    for start in range(0, len(held_out), 8):
        batch = padded(held_out[start : start + 8], device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            guesses = draft.lm_head(states_before_answers(draft, batch)).argmax(-1)
        right += int((guesses == batch.ids[batch.is_answer]).sum())
        asked += len(guesses)
    return right / max(asked, 1)


def main() -> None:
    parser = argparse.ArgumentParser("specdec train draft", description="Train a draft on its target's answers.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, required=True, help="directory of answers-*.npz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--feed-forward", type=int, default=640)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--muon-rate", type=float, default=Rates.muon)
    parser.add_argument("--adamw-rate", type=float, default=Rates.adamw)
    options = parser.parse_args()
    target, tokenizer = load(options.target, options.device)
    files = sorted(options.answers.glob("answers-*.npz"))
    found = [answer for file in files for answer in texts.load(file)]
    held_out, training = parted(found)
    draft: Any = small(target, options.hidden, options.layers, options.feed_forward)
    project_embedding(draft, target)
    draft.to(options.device)
    report(f"{parameters(draft)} parameters, {len(found)} answers")
    optimizer = ScheduledOptimizer(draft, Rates(options.muon_rate, options.adamw_rate))
    clock, logged, step = Clock(options.minutes * 60), time.monotonic(), 0
    device_type = torch.device(options.device).type
    for batch in batches(training, options.batch_tokens, options.device, seed=2):
        if clock.progress >= 1:
            break
        with torch.autocast(device_type, torch.bfloat16, enabled=device_type != "cpu"):
            value = learned(draft, target, batch)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step(clock.progress)
        step += 1
        if time.monotonic() - logged > LOG_EVERY_S:
            logged = time.monotonic()
            report(f"{clock.used:5.0f} s step {step} divergence {value:.3f}")
    draft.bfloat16().save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    rate = agreement(draft.float(), held_out[:512], options.device)
    report(json.dumps({"steps": step, "agreement": round(rate, 4), "parameters": parameters(draft)}))


if __name__ == "__main__":
    main()
