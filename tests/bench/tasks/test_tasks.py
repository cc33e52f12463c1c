"""The questions of bench tasks, its methods and its tables. The models themselves are not in the repository."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from bench.load import formula
from bench.tasks.__main__ import main
from bench.tasks.asking import Answered, ask
from bench.tasks.chart import draw
from bench.tasks.methods import ALONE, METHODS, beside_flag, chosen
from bench.tasks.questions import Question, read_questions
from bench.tasks.serving import count_help
from bench.tasks.table import Figure, figures_of, tables
from draft_service.drafters.ngram_model import NgramModel, TextCounts, scores_after
from specdec.cli.fetch import SmolLm2
from specdec.runner.vocabulary import read_tokenizer, read_vocabulary

TRAINED = SmolLm2.in_cache().draft.parent
"""Of the repository."""


def test_our_questions_are_eight_tasks_of_eight() -> None:
    assert set(Counter(each.task for each in read_questions(None, 99)).values()) == {8}
    assert len(read_questions(None, 2)) == 16


def test_questions_of_spec_bench_are_read_with_their_turns(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": [f"What is {n}?", "And now?"]} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_questions(file, 2) == [Question("qa", (f"What is {n}?", "And now?")) for n in range(2)]
    assert read_questions(file, 1, num_turns=1) == [Question("qa", ("What is 0?",))]


@pytest.mark.parametrize("line", ['{"category": "qa"}', '{"category": "qa", "turns": []}', "[]", "no JSON"])
def test_a_file_of_another_form_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(line)
    with pytest.raises(ValueError, match="a line is not JSON with category and turns"):
        read_questions(tmp_path / "questions.jsonl", 2)


class Echo:
    """A client that answers with what it was told last, and ``ending``."""

    def __init__(self, ending: str = "") -> None:
        self.asked: list[Mapping[str, Any]] = []
        self._ending = ending

    async def generate(self, **fields: Any) -> list[Any]:
        self.asked.append(json.loads(json.dumps(fields)))
        finish = SimpleNamespace(speculation=SimpleNamespace(num_rounds=2))
        last = fields["chat"]["messages"][-1]["content"]
        return [SimpleNamespace(text=f"{last}!{self._ending}", token_ids=[1, 2, 3], finish=finish)]


async def test_a_second_turn_follows_the_first_answer_with_every_method_and_salt() -> None:
    clients: dict[str, Any] = {ALONE: Echo(), "head": Echo()}
    found = await ask(clients, [Question("qa", ("One?", "Two?")), Question("qa", ("Three?",))], 9, 0.0, lambda: None)
    for method, client in clients.items():
        _, *chats = [each["chat"]["messages"] for each in client.asked]
        said = [[message["content"] for message in chat] for chat in chats]
        assert said == [["One?"], ["One?", "One?!", "Two?"], ["Three?"]]
        assert [message["role"] for message in chats[1]] == ["user", "assistant", "user"]
        assert {each["cache_salt"] for each in client.asked} == {method}
        assert {each.get("num_draft_tokens") for each in client.asked} == {0 if method == ALONE else None}
    assert Counter(each.method for each in found) == {ALONE: 3, "head": 3}


async def test_a_text_that_differs_is_told() -> None:
    clients: dict[str, Any] = {ALONE: Echo(), "head": Echo("!")}
    with pytest.raises(ValueError, match="the texts of a question differ: Say hello"):
        await ask(clients, [], 9, 0.0, lambda: None)


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(typer.BadParameter, match="there is no method else: lookup, history"):
        main(methods="lookup,else")


def test_a_method_without_its_head_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    served, missing = chosen(list(METHODS), tmp_path)
    assert missing == ["head", "redrafter", "head and draft", "all"]
    assert served == [name for name in METHODS if name not in missing]
    assert chosen(["all", "head"], TRAINED) == (["all", "head"], [])


def test_a_head_is_a_folder_and_the_others_are_names() -> None:
    told = {method.beside: beside_flag(method.beside, Path("heads")) for method in METHODS.values()}
    assert told == {
        "": [],
        "head": ["--head=heads/head"],
        "medusa": ["--head=heads/medusa"],
        "redrafter": ["--head=heads/redrafter"],
        "recycling": ["--self-draft=recycling"],
        "lookahead": ["--self-draft=lookahead"],
    }


def test_the_ngram_model_is_of_the_tokenizer_and_knows_what_python_says(tmp_path: Path) -> None:
    draft = TRAINED / "draft"
    model = NgramModel.load(count_help(draft, tmp_path))
    assert model.fingerprint == read_vocabulary(draft / "tokenizer.json").fingerprint
    tokenizer = read_tokenizer(draft / "tokenizer.json")
    tail = tokenizer.encode("The for statement is used to iterate over the elements of a", add_special_tokens=False).ids
    assert " sequence" in [tokenizer.decode([token]) for token in scores_after(tail, model, TextCounts(), count=4)]


def test_a_figure_is_the_median_over_questions_beside_the_target_alone() -> None:
    found = []
    for seconds in (1.0, 2.0, 4.0):
        found += [Answered("qa", ALONE, seconds, 20, 20), Answered("qa", "draft", seconds / 2, 20, 10)]
    found[-1] = Answered("qa", "draft", 400.0, 20, 5)
    length, speed, speed_of_all = figures_of(found)["qa"]["draft"]
    assert speed == 2.0
    assert speed_of_all == 7 / 401.5
    assert length == pytest.approx((2 + 2 + 4) / 3)


def test_the_tables_fit_80_columns_with_every_method_and_the_tasks_of_spec_bench() -> None:
    tasks = [f"{word}_{number}" for number, word in enumerate(["summarization", "qa", "math_reasoning"] * 4)]
    one, every = Figure(3.25, 1.5, 1.6), Figure(4.25, 1.2, 0.8)
    figures = {task: dict.fromkeys(METHODS, one) | {"all": every} for task in (*tasks, "rag")}
    shown = StringIO()
    for table in tables(figures):
        Console(file=shown, width=80).print(table)
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["head", "and", "draft", *["1.50"] * 13] in lines
    assert ["recycling", *["3.25"] * 13] in lines
    for ratio in ("0.80", "0.50"):
        assert ["all", "/", "best", *[ratio] * 13] in lines


@pytest.mark.parametrize(("name", "start"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml")])
def test_the_chart_is_drawn(name: str, start: bytes, tmp_path: Path) -> None:
    draw(
        {task: {"lookup": Figure(1.2, 1.1, 1.1), "head": Figure(2.0, 0.5, 0.6)} for task in ("qa", "math")},
        "",
        tmp_path / name,
    )
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_formula_gives_less_at_more_load_and_never_less_than_the_target_alone() -> None:
    for method in ("lookup", "draft", "head"):
        ratios = [formula(method, requests, 160) for requests in (1, 8, 32, 128, 4096)]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] > 1.8
        assert ratios[-1] == pytest.approx(1.0, abs=0.05)
