"""What is too long in a request is refused before it is read."""

from __future__ import annotations

import pytest

from orchestrator.api import bounds
from orchestrator.api.bounds import MAX_PROMPT_BYTES
from specdec.core.errors import ContextExceeded
from tests.orchestrator.api.test_request import TOKENIZER, read, refused

MANY = 1 << 18


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        (dict(text="é" * (MAX_PROMPT_BYTES // 2 + 1)), "text", f"at most {MAX_PROMPT_BYTES} bytes, not"),
        (dict(stop=[""] * MANY), "stop", f"at most 16 strings, not {MANY}"),
        (dict(stop_token_ids=[2**32 - 1] * MANY), "stop_token_ids", f"at most 256 ids, not {MANY}"),
        (dict(logit_bias=dict.fromkeys(range(MANY), 1e9)), "logit_bias", f"at most 300 tokens, not {MANY}"),
        (dict(resume={i: {} for i in range(MANY)}), "resume", f"at most 64 samples, not {MANY}"),
        (dict(resume={0: {"token_ids": [1] * 21}}), "resume[0]", "more ids than the context of 20"),
        (dict(cache_salt="x" * MANY), "cache_salt", f"at most 256 bytes, not {MANY}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_is_too_long_is_refused_by_its_length_alone(fields, name, words):
    """And nothing else of it is read: no entry of it is named."""
    request = refused(tokenizer=TOKENIZER, **fields)
    assert list(request) == [name]
    assert words in request[name]


def test_everything_that_is_too_long_is_named_at_once():
    long = refused(stop=["a"] * 17, stop_token_ids=[1] * 257, resume={i: {} for i in range(65)})
    assert set(long) == {"stop", "stop_token_ids", "resume"}


def test_too_many_token_ids_are_counted_and_not_looked_at():
    with pytest.raises(ContextExceeded, match=f"{MANY} in the prompt, 1 in the completion"):
        read(token_ids={"token_ids": [2**32 - 1] * MANY})


def test_a_text_of_the_greatest_length_is_read():
    text = "a" * MAX_PROMPT_BYTES
    with pytest.raises(ContextExceeded):
        read(text=text, tokenizer=TOKENIZER)


def test_the_ids_of_all_resumed_samples_together_are_bounded(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_RESUMED_IDS", 30)
    received = {"token_ids": [1] * 11}
    assert "30" in refused(n=3, seed=1, resume={0: received, 1: received, 2: received})["resume"]
    assert len(read(n=2, seed=1, max_tokens=15, resume={0: received, 1: received}).resume) == 2
