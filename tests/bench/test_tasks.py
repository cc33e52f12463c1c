"""bench tasks and bench load: methods, cases and tables; with bench never-slower of what is running, HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import load, never_slower, tasks
from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.methods import ALL, ALONE, Method, all_methods, chosen, count_help, with_models
from bench.harness.models import Models, PairName, pair_of
from bench.harness.questions import Question, read_questions
from bench.harness.runner import Answer, Contender, Results, Row, Run
from draft_service.drafters.ngram_model import NgramModel, TextCounts, scores_after
from specdec.cli.fetch import SmolLm2
from specdec.cli.processes import free_ports, listening, service
from specdec.runner.vocabulary import read_tokenizer, read_vocabulary
from tests.checkout import DEMO

TRAINED = SmolLm2.in_cache().draft.parent
"""Of the repository."""


def rows_of(case: str, rates: Mapping[str, float]) -> list[Row]:
    """Of contenders by name, in tokens per second. All are compared with the first one."""
    rows: list[Row] = []
    for contender, rate in rates.items():
        rows.append(Row(case, contender, [Run(1 / rate, [Answer([7])])], first=rows[0] if rows else None))
    return rows


async def unasked(request: Any) -> Run:
    raise AssertionError


def test_methods_are_those_that_the_models_allow() -> None:
    models = Models("", "T", ("/d/draft",), ("/h/head", "/h/medusa"))
    methods = all_methods(models)
    assert methods["medusa"] == Method("--head=/h/medusa")
    assert methods["draft"] == Method(draft="/d/draft")
    assert methods["recycling"] == Method("--self-draft=recycling")
    assert methods[ALL] == Method("--head=/h/head", "/d/draft", "--lookup-history=100000")
    assert methods["head and draft"] == Method("--head=/h/head", "/d/draft")
    assert list(with_models(models)) == ["lookup", "draft", "head", "medusa"]
    assert ALL not in all_methods(Models("", "T", ("/d/draft",)))
    assert list(with_models(Models("", "T", ("/d/small", "/d/large")))) == ["lookup", "small", "large"]
    assert list(chosen(methods, ["draft", "lookup"])) == ["draft", "lookup"]
    with pytest.raises(ValueError, match="there is no method else with these models, but lookup, draft"):
        chosen(methods, ["lookup", "else"])


def test_the_ngram_model_is_of_the_tokenizer_and_knows_what_python_says(tmp_path: Path) -> None:
    draft = TRAINED / "draft"
    model = NgramModel.load(Path(count_help(str(draft), tmp_path)))
    assert model.fingerprint == read_vocabulary(draft / "tokenizer.json").fingerprint
    tokenizer = read_tokenizer(draft / "tokenizer.json")
    tail = tokenizer.encode("The for statement is used to iterate over the elements of a", add_special_tokens=False).ids
    assert " sequence" in [tokenizer.decode([token]) for token in scores_after(tail, model, TextCounts(), count=4)]


def test_each_task_is_a_case_behind_one_that_warms_up() -> None:
    cases = tasks.cases_of(read_questions("builtin", 2), [Contender(ALONE, unasked)])
    assert [(case.name, len(case.turns), case.num_warm_ups) for case in cases[:3]] == [
        ("warming up", 1, 1),
        ("conversation", 2, 0),
        ("translation", 2, 0),
    ]


def test_the_speed_of_all_methods_at_once_is_shown_over_the_best_other_one() -> None:
    rows = rows_of("qa", {ALONE: 10.0, "draft": 20.0, "head": 15.0, ALL: 30.0})
    *speeds, lengths = tasks.tables(Results(rows)).values()
    for table in speeds:
        assert list(table.columns[0].cells) == ["draft", "head", ALL, "all / best"]
        assert list(table.columns[1].cells)[-1] == "1.50"
    assert "all / best" not in lengths.columns[0].cells


def test_the_formula_gives_less_at_more_load_and_never_less_than_the_target_alone() -> None:
    for method in ("lookup", "draft", "head"):
        ratios = [load.formula(method, requests, 160) for requests in (1, 8, 32, 128, 4096)]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] > 1.8
        assert ratios[-1] == pytest.approx(1.0, abs=0.05)


def test_a_load_has_so_many_requests_and_its_methods_are_compared_with_their_own_target() -> None:
    questions = [Question("", (f"{number}",)) for number in range(5)]
    case = load.case_of(4, [Contender(ALONE, unasked)], questions, repeats=1)
    assert [[question.turns[0] for question in turn] for turn in case.turns] == [list("0123"), list("4012")]
    rows = rows_of("8", {ALONE: 10.0, "lookup": 20.0}) + rows_of("8", {ALONE: 30.0, "draft": 45.0})
    assert load.over_alone(Results(rows), 160, with_formula=False) == {"lookup": {"8": 2.0}, "draft": {"8": 1.5}}
    assert "  formula, draft" in load.over_alone(Results(rows), 160, with_formula=True)


@pytest.mark.slow
async def test_a_pair_of_ones_own_is_measured_at_load_started_or_running(tmp_path: Path) -> None:
    """Over gRPC and over HTTP, with equal texts."""
    import asyncio

    small: dict[str, Any] = {"tokens": 8, "threads": 1, "per_task": 1}
    models = pair_of(PairName.demo, tmp_path)
    flags = ["--threads=1", "--kv-slots=4096"]
    async with Processes() as processes:
        front, _ = await processes.deployment(
            ("target_service", f"--model={models.target}", *flags),
            ("draft_service", f"--model={models.draft}", *flags),
            f"--tokenizer={models.target}",
        )
        [port] = free_ports(1)
        async with service("gateway", port, [f"--orchestrator={front.address}"]) as gateway:
            await listening(gateway)
            for number, where in enumerate(({"address": front.address}, {"url": f"http://{gateway.address}/v1"})):
                common = Common(**small, **where, json=tmp_path / f"{number}")
                await asyncio.to_thread(load.main, common, "1,2", 1)
                await asyncio.to_thread(tasks.main, Common(**small, **where), None, None)
                common = Common(**where, per_task=1, temperature=[0.7], json=tmp_path / f"window {number}")
                await asyncio.to_thread(never_slower.main, common, 0.0, requests="2", tokens="8", repeats=1)
    for number in range(2):
        written = json.loads((tmp_path / f"{number}").read_text())
        assert [(each["case"], each["contender"]) for each in written["rows"]] == [
            (requests, name) for requests in ("1", "2") for name in (ALONE, "as deployed")
        ]
        assert written["differing"] == []
        assert all(each["tokens_per_pass"] >= 1 for each in written["rows"])
        rows = json.loads((tmp_path / f"window {number}").read_text())["rows"]
        assert [row["contender"] for row in rows] == [ALONE, "as deployed"]
        assert all(run["tokens"] >= 2 * 64 for row in rows for run in row["runs"])
    common = Common(**small, target=str(DEMO / "target"), draft=[str(DEMO / "draft")], json=tmp_path / "2")
    await asyncio.to_thread(load.main, common, "2", 1)
    written = json.loads((tmp_path / "2").read_text())
    assert [each["contender"] for each in written["rows"]] == [ALONE, "lookup", "draft"]
