"""bench peers on a tiny pair: all contenders generate the same, and our speed is over the best of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.command import Common, Dtype
from bench.harness.models import Models
from bench.harness.runner import Answer, Results, Row, Run
from bench.harness.windows import Windows, windows_of
from bench.peers import ALONE, OURS, TransformersPair, before_end, columns, main
from tests.bench.conftest import SMALL
from tests.checkout import DEMO


def test_prompts_are_new_and_of_their_length_and_outputs_end_before_an_end_token() -> None:
    for source in (Windows(50), Windows(50, text=range(500)), windows_of(Common(), Models("", str(DEMO / "target")))):
        first, second = source.take(1, 20)[0], source.take(1, 20)[0]
        assert len(first) == len(second) == 20
        assert first != second
    with pytest.raises(ValueError, match="500"):
        Windows(50, text=range(500)).take(1, 501)
    assert before_end([3, 4, 0, 0], [0]) == before_end([3, 4], [0]) == [3, 4]
    assert before_end([3, 0], []) == [3, 0]


def test_our_speed_is_over_the_fastest_of_transformers() -> None:
    rates = {"transformers": 10.0, "transformers, K = 4": 20.0, ALONE: 15.0, OURS: 30.0}
    rows = [Row("1 request", name, [Run(1 / rate, [Answer([7])])]) for name, rate in rates.items()]
    over_best = columns(Results(rows))["over best"]
    assert [over_best(row) for row in rows] == ["", "", "0.75 x", "1.50 x"]
    over_alone = columns(Results(rows))["over alone"]
    assert [over_alone(row) for row in rows] == ["", "", "", "2.00 x"]


@pytest.mark.slow
def test_assisted_and_padded_generation_give_the_text_of_generate(small_pair) -> None:
    prompts = Windows(SMALL.vocab_size).take(3, 20)
    pair = TransformersPair(str(small_pair.target), str(small_pair.draft), "float32")
    expected = [pair.generate([prompt], 16)[0] for prompt in prompts]
    assert all(len(output) == 16 for output in expected)
    assert pair.generate(prompts, 16) == expected
    assert [pair.generate([prompt], 16, num_draft_tokens=4)[0] for prompt in prompts] == expected
    assert 0.6 < pair.acceptance(prompts, expected) < 0.95


@pytest.mark.slow
def test_the_services_generate_what_transformers_does(small_pair, tmp_path: Path) -> None:
    """float32 has no ties to break."""
    text = tmp_path / "humaneval.jsonl"
    text.write_text(json.dumps({"prompt": " ".join(f"w{number}" for number in range(400))}))
    models = {"target": str(small_pair.target), "draft": [str(small_pair.draft)], "questions": f"humaneval={text}"}
    main(Common(**models, dtype=Dtype.float32, tokens=8, threads=1, json=tmp_path / "json"), "1,2", 1)
    written = json.loads((tmp_path / "json").read_text())
    names = [(each["case"], each["contender"]) for each in written["rows"]]
    assert names[-3:] == [("2 requests", name) for name in ("transformers, padded batch", ALONE, OURS)]
    assert len(names) == 1 + 4 + 2 + 3
    assert [each["same_as_first"] for each in written["rows"]] == [1] * 7 + [2] * 3
