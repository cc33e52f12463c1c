"""The trainer of heads: its unrolled steps are those of a head that is served, and what it writes can be served."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.training import distill, loop, texts
from models.training.demo.target import cross_entropy
from models.training.distill import add_gradients, divergence
from models.training.heads import answers, questions, train
from models.training.heads.base import Lesson
from models.training.heads.eagle3 import Eagle3
from models.training.heads.export import Card, save
from models.training.heads.train import KINDS
from models.training.texts import Text, batches, padded
from specdec.runner.checkpoint import Checkpoint
from target_service.heads.checkpoint import read_head
from tests.checkout import DEMO

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=4096,
    num_hidden_layers=6,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def test_a_step_is_what_a_served_head_computes_after_the_steps_before() -> None:
    """Row by row, with the keys that are there then: those of the text up to the row, and those of its own steps."""
    torch.manual_seed(0)
    head = Eagle3(CONFIG, torch.randn(20, 64), 3)
    embedded, taps = torch.randn(2, 9, 64), torch.randn(2, 8, 192)
    unrolled = head.unroll(embedded[:, :8], Lesson(taps, taps[..., :0], taps[..., 0]))
    layer, attention = head.midlayer, head.midlayer.self_attn

    def turned(x: Tensor, position: int) -> Tensor:
        angle = position * 10_000.0 ** (-torch.arange(16) / 16)
        first, second = x[..., :16], x[..., 16:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    def projected(token: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.cat([layer.input_layernorm(token), layer.hidden_norm(state)])
        query, key = attention.q_proj(wide).view(2, 32), attention.k_proj(wide)
        return turned(query, position), turned(key, position), attention.v_proj(wide)

    for text in range(2):
        states = head.fc(taps[text])
        rows = [projected(embedded[text, t], states[t], t + 1) for t in range(8)]
        for t in range(8):
            keys, values, state = [row[1] for row in rows[: t + 1]], [row[2] for row in rows[: t + 1]], states[t]
            query = rows[t][0]
            for step in range(3):
                if t + step >= 8:
                    break
                if step:
                    query, key, value = projected(embedded[text, t + step], state, t + 1 + step)
                    keys, values = [*keys, key], [*values, value]
                weights = (torch.stack(keys) @ query.T / 32**0.5).softmax(0)
                state = state + attention.o_proj((weights.T @ torch.stack(values)).flatten())
                state = state + layer.mlp(layer.post_attention_layernorm(state))
                assert torch.allclose(state, unrolled[step][text, t], atol=1e-5)


@pytest.mark.slow
def test_what_is_trained_can_be_served_and_a_second_run_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    target = _target(tmp_path / "target")
    asked = tmp_path / "questions.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": f"what is {number}?"}) for number in range(40)))
    flags = [f"--target={target}", f"--output={tmp_path / 'head'}", f"--data={asked}", "--device=cpu", "--steps=3"]
    flags += ["--new-tokens=12", "--answers-at-once=8", "--draft-vocab=256", "--batch-tokens=256"]
    monkeypatch.setattr(sys, "argv", ["train", *flags, "--minutes=0.1"])
    train.main()
    files = read_head(tmp_path / "head")
    assert (files.kind, files.layers) == ("eagle3", (1, 2, 2))
    assert files.ids is not None
    assert len(files.ids) == 256 == len(files.weights["lm_head.weight"])
    shards = sorted((tmp_path / "head").glob("answers-*.npz"))
    assert "Serve it with its target" in (tmp_path / "head" / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["train", *flags, "--minutes=0.11"])
    train.main()
    assert sorted((tmp_path / "head").glob("answers-*.npz"))[: len(shards)] == shards
    sizes = ["--hidden=64", "--layers=1", "--feed-forward=64", "--batch-tokens=256", "--minutes=0.05", "--device=cpu"]
    given = [f"--target={target}", f"--answers={tmp_path / 'head'}", f"--output={tmp_path / 'draft'}"]
    monkeypatch.setattr(sys, "argv", ["distill", *given, *sizes])
    distill.main()
    draft, of_target = (Checkpoint.find(str(path), "auto").info for path in (tmp_path / "draft", target))
    assert draft.tokenizer_fingerprint == of_target.tokenizer_fingerprint


FILES: dict[str, dict[str, tuple[int, ...]]] = {
    "medusa": {
        "blocks.0.layers.0.weight": (64, 64),
        "blocks.0.layers.0.bias": (64,),
        "blocks.1.layers.0.weight": (64, 64),
        "blocks.1.layers.0.bias": (64,),
        "token_map": (256,),
    },
    "redrafter": {
        "input_proj.weight": (64, 128),
        "input_proj.bias": (64,),
        "lm_head.0.linear.weight": (64, 64),
        "lm_head.0.linear.bias": (64,),
        "lm_head.1.linear.weight": (64, 64),
        "lm_head.1.linear.bias": (64,),
        "rnn_u.weight": (64, 64),
        "rnn_u.bias": (64,),
        "rnn_w.weight": (64, 64),
        "d2t": (256,),
    },
}
OUTPUT = {
    "medusa": {"lm_heads.0.weight": (256, 64), "lm_heads.1.weight": (256, 64)},
    "redrafter": {"lm_head.2.weight": (256, 64)},
}


class CountedClock:
    """A clock that goes on by a second whenever it is asked for the progress."""

    def __init__(self, seconds: float, used: float = 0.0) -> None:
        self._seconds, self.used = seconds, used

    @property
    def progress(self) -> float:
        self.used += 1
        return min(self.used / self._seconds, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_a_trained_head_has_its_files_and_foresees_the_text_and_a_finished_run_makes_no_step(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    target, output = _target(tmp_path / "target", counts=True), tmp_path / "head"
    asked = tmp_path / "questions.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": f"what is {number}?"}) for number in range(40)))
    flags = [f"--kind={kind}", f"--target={target}", f"--output={output}", f"--data={asked}", "--steps=2", "--tied"]
    flags += ["--new-tokens=20", "--answers-at-once=8", "--draft-vocab=256", "--batch-tokens=256", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["train", *flags, "--minutes=4"])
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(train, "ANSWER_SHARE", 0.03)
    monkeypatch.setattr(loop, "Clock", CountedClock)
    monkeypatch.setattr(answers, "Clock", CountedClock)
    train.main()
    weights = load_file(output / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == FILES[kind]
    parsed = train.parse()
    model, _ = loop.load(str(target), parsed)
    held_out, training = texts.split(texts.load(output))
    ids, _ = train.drawable(training, 256, 4096)
    trained, untrained = (KINDS[kind](CONFIG, model.lm_head.weight[ids].detach(), 2) for _ in range(2))
    trained.load_state_dict({name: weights[name].float() for name in trained.state_dict()})
    untrained.start_from(model)
    before, after = (train.acceptance(head, model, held_out, ids, parsed) for head in (untrained, trained))
    assert max(before) < 0.3
    assert min(after) > 0.8
    monkeypatch.setattr(train, "loss_of", None)
    train.main()
    again = load_file(output / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_forward_of_the_files_is_that_of_the_trainer(kind: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    ids = torch.randperm(4096)[:256].sort().values
    output = torch.randn(256, 64).bfloat16().float()
    head = KINDS[kind](CONFIG, output, 2)
    head.load_state_dict({name: value.bfloat16().float() for name, value in head.state_dict().items()})
    card = Card(head.TITLE, "a", "b", 1, "CPU", 1, 1, 1, 1.0, [0.5, 0.5])
    save(head, CONFIG, ids, card=card, directory=tmp_path, tied=tied)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: tuple(value.shape) for name, value in stored.items()} == FILES[kind] | (
        OUTPUT[kind] if not tied else {}
    )
    assert (config["vocab_size"], config["hidden_size"], config["dtype"]) == (4096, 64, "bfloat16")
    embedded, last = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    states = head.unroll(embedded, Lesson(last[..., :0], last, last[..., 0]))
    plain = {"medusa": _plain_medusa, "redrafter": _plain_redrafter}[kind]
    numbers = {name: value.double().numpy() for name, value in stored.items()}
    logits = plain(config, numbers, output.double().numpy(), last[0].double().numpy(), embedded[0].double().numpy())
    mapped = numbers["token_map"] if kind == "medusa" else numbers["d2t"] + np.arange(256)
    assert mapped.tolist() == ids.tolist()
    for step in range(2):
        for row in range(4):
            mine = head.logits(states[step])[0, row].detach().numpy()
            assert np.allclose(mine, logits(row, step), atol=1e-3), (step, row)


Arrays = dict[str, Any]


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def _plain_medusa(config: Any, w: Arrays, rows: Any, last: Any, embedded: Any) -> Callable[[int, int], Any]:
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 2, 1)
    assert config["original_lm_head"] == ("lm_heads.0.weight" not in w)

    def logits(row: int, step: int) -> Any:
        x = last[row]
        x = x + _silu(w[f"blocks.{step}.layers.0.weight"] @ x + w[f"blocks.{step}.layers.0.bias"])
        return w.get(f"lm_heads.{step}.weight", rows) @ x

    return logits


def _plain_redrafter(config: Any, w: Arrays, rows: Any, last: Any, embedded: Any) -> Callable[[int, int], Any]:
    assert (config["model_type"], config["num_draft_layers"]) == ("recurrent_drafting_drafter", 2)
    assert config["rnn"]
    assert config["tie_word_embeddings"] == ("lm_head.2.weight" not in w)

    def logits(row: int, step: int) -> Any:
        s = np.zeros(64)
        for token in embedded[row : row + step + 1]:
            s = _silu(w["rnn_w.weight"] @ token + w["rnn_u.weight"] @ s + w["rnn_u.bias"])
        x = w["input_proj.weight"] @ np.concatenate([last[row], s]) + w["input_proj.bias"]
        for block in range(config["num_draft_layers"]):
            x = x + _silu(w[f"lm_head.{block}.linear.weight"] @ x + w[f"lm_head.{block}.linear.bias"])
        return w.get("lm_head.2.weight", rows) @ x

    return logits


def _target(directory: Path, counts: bool = False) -> Path:
    """``counts``: its most likely next token is the next id, or the lowest of a group of 16 after its highest."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    if counts:
        tokens = torch.arange(4096)
        after = tokens - tokens % 16 + (tokens + 1) % 16
        model.lm_head.weight.data[after] = 100 * model.model.embed_tokens.weight.data
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def test_an_answer_ends_at_its_end_token_and_comes_back_from_its_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG).eval()
    model.generation_config = GenerationConfig(eos_token_id=list(range(0, 4096, 5)), pad_token_id=0)
    written = answers.write(model, [[5, 6, 7], [8], [9, 10]], 30, 0.9)
    for text, prompt in zip(written, ([5, 6, 7], [8], [9, 10]), strict=True):
        assert text.ids[: text.first] == prompt
        assert all(token % 5 for token in text.answer[:-1])
        assert len(text.answer) == 30 or text.answer[-1] % 5 == 0
    texts.save(written, tmp_path, number=0)
    assert texts.load(tmp_path) == written


def test_every_answer_is_in_some_batch_and_batches_keep_their_size() -> None:
    rng = random.Random(2)
    every = [Text([number + 1] * rng.randrange(4, 30), 2) for number in range(50)]
    seen: set[int] = set()
    for number, batch in enumerate(batches(every, 120, "cpu", seed=1)):
        if number == 200:
            break
        seen |= set(batch.ids[batch.is_answer].tolist())
        assert batch.ids.numel() <= 240 or len(batch.ids) == 1  # texts in a row may leave a short one over
    assert seen == set(range(1, 51))
    batch = padded(every[:2], "cpu")
    assert batch.is_answer.sum() == sum(len(answer.ids) - 2 for answer in every[:2])


def test_questions_are_all_there_and_a_bad_line_is_named(tmp_path: Path) -> None:
    assert len(questions.builtin()) == len(set(questions.builtin())) > 20_000
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        questions.of_file(file)


def test_gradients_of_parts_are_those_of_the_mean_loss_over_the_answers(monkeypatch: Any) -> None:
    """From a target's distribution, and from the text alone."""
    torch.manual_seed(4)
    target: Any = LlamaForCausalLM(CONFIG)
    model: Any = LlamaForCausalLM(CONFIG)
    batch = padded([Text([5, 6, 7, 8, 9], 2), Text([10, 11, 12], 1)], "cpu")
    rows = ([0, 0, 0, 1, 1], [1, 2, 3, 0, 1])
    logs = model(input_ids=batch.ids).logits.log_softmax(-1)[rows]
    target_logs = target(input_ids=batch.ids).logits.log_softmax(-1)[rows].detach()
    losses = {
        divergence: (target_logs.exp() * (target_logs - logs)).sum(-1).mean(),
        None: -logs[range(5), [7, 8, 9, 11, 12]].mean(),
    }
    monkeypatch.setattr(distill, "_ROWS_AT_ONCE", 2)
    parameters = list(model.parameters())
    for kind, loss in losses.items():
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        model.zero_grad()
        row_loss = kind(target, batch) if kind else cross_entropy(batch)
        value = add_gradients(model, batch, row_loss)
        assert torch.allclose(value, loss, atol=1e-5)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient, atol=1e-5)
