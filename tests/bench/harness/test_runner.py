"""Turns, the comparison of texts, and figures, with contenders that answer at once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bench.harness.questions import Question
from bench.harness.runner import (
    Answer,
    Ask,
    Case,
    Contender,
    Request,
    Results,
    Row,
    Run,
    Window,
    at_temperatures,
    measure,
)
from specdec.v1.generation_pb2 import SpeculationStats


class Echo:
    """Answers with what it was told last, and ``ending``, after ``seconds``."""

    def __init__(self, ending: str = "", seconds: float = 1.0) -> None:
        self.asked: list[Request] = []
        self._ending, self._seconds = ending, seconds

    async def __call__(self, request: Request) -> Run:
        self.asked.append(request)
        texts = [f"{prompt['chat']['messages'][-1]['content']}!{self._ending}" for prompt in request.prompts]
        stats = SpeculationStats(num_rounds=2)
        return Run(self._seconds, [Answer([len(text), 1, 2, 3], text, stats) for text in texts])


def contenders(asks: Mapping[str, Ask]) -> list[Contender]:
    first = next(iter(asks))
    return [Contender(name, ask, "" if name == first else first) for name, ask in asks.items()]


async def results_of(cases: list[Case]) -> Results:
    return await measure(cases, 9, lambda case, contender: None)


async def test_a_second_turn_follows_the_first_answer_with_every_contender_and_salt() -> None:
    echoes = {"alone": Echo(), "head": Echo()}
    questions = [Question("qa", ("One?", "Two?")), Question("qa", ("Three?",))]
    results = await results_of([Case("qa", [[each] for each in questions], contenders(echoes))])
    for name, echo in echoes.items():
        said = [[message["content"] for message in request.prompts[0]["chat"]["messages"]] for request in echo.asked]
        assert said == [["One?"], ["One?", "One?!", "Two?"], ["Three?"]]
        assert {request.salt for request in echo.asked} == {f" of {name}"}
    assert [(row.contender, len(row.runs), row.num_same) for row in results.rows] == [("alone", 3, 3), ("head", 3, 3)]
    assert (results.differing, results.num_compared) == ([], 3)


async def test_questions_of_a_turn_are_asked_together_and_each_chat_goes_on_by_itself() -> None:
    echo = Echo()
    together = [Question("a", ("One?",)), Question("b", ("Two?", "More?"))]
    await results_of([Case("2", [together], contenders({"alone": echo}))])
    assert [len(request.prompts) for request in echo.asked] == [2, 1]
    assert [message["content"] for message in echo.asked[1].prompts[0]["chat"]["messages"]] == [
        "Two?",
        "Two?!",
        "More?",
    ]


async def test_the_order_of_contenders_rotates_and_warm_ups_are_shorter_and_left_out() -> None:
    order: list[tuple[str, int]] = []

    def asking(name: str) -> Ask:
        async def ask(request: Request) -> Run:
            order.append((name, request.max_tokens))
            return Run(1.0, [Answer([1])])

        return ask

    asks = {name: asking(name) for name in ("a", "b", "c")}
    prepared: list[None] = []
    case = Case("", [[Question("", ("?",))]] * 3, contenders(asks), num_warm_ups=1, warm_up_share=0.5)
    case = Case(**{name: getattr(case, name) for name in case.__slots__} | {"prepare": lambda: prepared.append(None)})
    results = await results_of([case])
    assert "".join(name for name, _ in order) == "abcbcacab"
    assert [tokens for _, tokens in order] == [4] * 3 + [9] * 6
    assert [len(row.runs) for row in results.rows] == [2] * 3
    assert len(prepared) == case.num_runs == 9


async def test_a_text_that_differs_is_named_even_in_a_warm_up() -> None:
    asks = {"alone": Echo(), "head": Echo("!"), "other": Echo("!")}
    unchecked = [Contender("alone", asks["alone"]), Contender("head", asks["head"], "alone")]
    unchecked.append(Contender("other", asks["other"]))
    case = Case("qa", [[Question("qa", ("How much?",))]] * 2, unchecked, num_warm_ups=1)
    results = await results_of([case])
    assert results.differing == ["qa, head: 'How much?'"] * 2
    assert [row.num_same for row in results.rows] == [1, 0, 0]


async def test_an_answer_without_tokens_differs_from_one_whose_tokens_have_no_text() -> None:
    def answers(ids: list[int]) -> Ask:
        async def ask(request: Request) -> Run:
            return Run(1.0, [Answer(ids)])

        return ask

    case = Case("", [[Question("", ("?",))]], contenders({"a": answers([1]), "b": answers([])}))
    assert (await results_of([case])).differing


async def test_texts_that_a_window_has_cut_are_compared_as_far_as_they_go_and_are_in_no_figure_of_rounds() -> None:
    def answers(*texts: tuple[list[int], bool]) -> Ask:
        async def ask(_: Request) -> Run:
            stats = SpeculationStats(num_rounds=1)
            return Run(1.0, [Answer(ids, "", SpeculationStats() if is_cut else stats, is_cut) for ids, is_cut in texts])

        return ask

    asks = {
        "alone": answers(([1, 2], False), ([3], True)),
        "draft": answers(([1, 2], False), ([3, 4], True), ([5], True)),
    }
    other = answers(([1, 2, 3], True), ([4], True))  # the first goes on where the text has ended
    questions = [Question("", prompt={"text": str(index)}) for index in range(4)]
    case = Case("1", [questions], contenders(asks | {"other": other}), window=Window(1, 3))
    results = await results_of([case])
    assert results.differing == ["1, other: '0'", "1, other: '1'"]
    assert [(row.num_same, row.num_texts, row.tokens_per_pass) for row in results.rows[:2]] == [(2, 2, 2.0)] * 2


def test_the_first_answers_of_a_window_do_not_all_end_at_once() -> None:
    request = Request([{}] * 9, 8, 0.0, 1, "", Window(4, 64))
    assert [request.max_tokens_of(index) for index in range(6)] == [2, 4, 6, 8, 8, 8]


def test_a_figure_is_the_median_over_turns_next_to_the_first_contender() -> None:
    def run(seconds: float, rounds: int) -> Run:
        return Run(seconds, [Answer([0] * 20, stats=SpeculationStats(num_rounds=rounds))])

    alone = Row("qa", "alone", [run(1.0, 20), run(2.0, 20), run(4.0, 20)])
    draft = Row("qa", "draft", [run(0.5, 10), run(1.0, 10), run(400.0, 5)], first=alone)
    assert (draft.over_first, alone.over_first) == (2.0, 1.0)
    assert draft.over_first_in_all == pytest.approx(7 / 401.5)
    assert draft.tokens_per_pass == pytest.approx((2 + 2 + 4) / 3)
    assert alone.tokens_per_s == 10.0


def test_lookup_tokens_are_no_draft_tokens() -> None:
    stats = SpeculationStats(num_rounds=11, num_draft_tokens=40, num_accepted_tokens=25)
    stats.num_lookup_tokens, stats.num_accepted_lookup_tokens = 20, 15
    row = Row("", "", [Run(1.0, [Answer([0], stats=stats)] * 2)])
    assert row.acceptance == 0.5
    assert row.per_round("num_draft_tokens") - row.per_round("num_lookup_tokens") == 2.0
    assert Row("", "", [Run(1.0, [Answer([0])])]).acceptance == 0


async def test_cases_of_one_name_are_each_compared_with_a_first_contender_of_their_own() -> None:
    asks = ({"alone": Echo(), "lookup": Echo(seconds=0.5)}, {"alone": Echo(seconds=2.0), "draft": Echo(seconds=0.5)})
    results = await results_of([Case("8", [[Question("qa", ("?",))]], contenders(of_case)) for of_case in asks])
    assert [row.over_first for row in results.rows] == [1.0, 2.0, 1.0, 4.0]


def test_a_case_at_several_temperatures_is_named_by_them_and_finds_nothing_of_another_one() -> None:
    case = Case("qa", [], [])
    assert [each.name for each in at_temperatures([case], [0.5])] == ["qa"]
    cold, warm = at_temperatures([case], [0.0, 1.0])
    assert (cold.name, warm.name) == ("qa, T = 0", "qa, T = 1")
    assert cold.salt != warm.salt
