"""Defaults of sampling from a model's generation configuration."""

from __future__ import annotations

import json
import math

import pytest

from orchestrator.tokenizer.defaults import Defaults


def read(tmp_path, **values):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(values))
    return Defaults.read(file)


def test_what_a_model_says_is_the_default(tmp_path):
    said = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    assert read(tmp_path, do_sample=True, eos_token_id=2, **said) == Defaults(**said)
    assert read(tmp_path, temperature=None, top_k=None) == Defaults() == Defaults.read(None)


def test_a_model_that_does_not_sample_is_greedy(tmp_path):
    assert read(tmp_path, do_sample=False, temperature=0.6).temperature == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 2), ("top_k", -1), ("top_k", "a"), ("min_p", []), ("top_k", math.inf)],
)
def test_what_is_out_of_its_range_is_told_at_the_start(tmp_path, name, value):
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        read(tmp_path, **{name: value})
