"""Asks contenders the same questions by turns, compares their texts, and computes their figures.

Does not know how a contender answers, and how results are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.harness.questions import Question
from specdec.v1.generation_pb2 import SpeculationStats


@dataclass(frozen=True, slots=True)
class Window:
    """So many prompts are answered at any time, the next one in the place of one that has ended, until there are
    ``num_tokens`` of all together. The answers that have not ended then are cut."""

    num_live: int
    num_tokens: float


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts, each as fields of GenerateRequest. Prompt i has the seed ``seed`` + i. Without a window all are asked at
    the same time.

    ``salt``: prompts with another salt are not to be found in a cache.
    """

    prompts: Sequence[Mapping[str, Any]]
    max_tokens: int
    temperature: float
    seed: int
    salt: str
    window: Window | None = None

    def max_tokens_of(self, index: int) -> int:
        """Of the answer to prompt ``index``. The first ones of a window are shorter, so that not all end at once: else
        a contender with answers that end at different times would read more prompts in the same window."""
        if self.window and index < self.window.num_live:
            return max(1, self.max_tokens * (index + 1) // self.window.num_live)
        return self.max_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """``stats`` are without rounds if the contender does not report them, or if the answer was cut by a window."""

    token_ids: list[int]
    text: str = ""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    is_cut: bool = False

    def is_same(self, other: Answer) -> bool:
        """As far as neither is cut."""
        length = min((len(answer.token_ids) for answer in (self, other) if answer.is_cut), default=None)
        return self.token_ids[:length] == other.token_ids[:length]


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to a request, which were there after ``seconds``; of a window those to the first prompts.

    ``used_s``: seconds of what the services did meanwhile, by its name; empty if that was not asked for.
    """

    seconds: float
    answers: Sequence[Answer]
    used_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.is_cut]

    @property
    def num_rounds(self) -> int:
        """Of whole answers."""
        return sum(answer.stats.num_rounds for answer in self.whole)

    @property
    def tokens_per_pass(self) -> float:
        """Of whole answers; 0 if rounds are not reported."""
        num_tokens = sum(len(answer.token_ids) for answer in self.whole)
        return num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together."""
        return self.num_tokens / self.seconds


Ask = Callable[[Request], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Contender:
    """``same_as`` names a contender of the case that must give equal texts; empty: none."""

    name: str
    ask: Ask
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What all ``contenders`` are asked. The questions of one of the ``turns`` are asked at the same time, or as the
    ``window`` has places for them.

    The first contender is what the others are compared with. The first ``num_warm_ups`` turns are left out, and have
    a ``warm_up_share`` of the tokens. No contender finds in a cache what it read in a case of another ``salt``.
    ``prepare`` is called before each run. ``max_tokens``: of an answer; 0: those of the whole comparison.
    """

    name: str
    turns: Sequence[Sequence[Question]]
    contenders: Sequence[Contender]
    temperature: float = 0.0
    num_warm_ups: int = 0
    warm_up_share: float = 1.0
    salt: str = ""
    window: Window | None = None
    max_tokens: int = 0
    prepare: Callable[[], None] = lambda: None

    @property
    def num_runs(self) -> int:
        return len(self.contenders) * sum(max(question.num_turns for question in questions) for questions in self.turns)


@dataclass(slots=True)
class Row:
    """The runs of a contender in a case, and their figures. ``num_same`` of ``num_texts`` are those of the first one.

    ``first``: the row of the case's first contender; None if it is this one.
    """

    case: str
    contender: str
    runs: list[Run] = field(default_factory=list)
    num_same: int = 0
    num_texts: int = 0
    first: Row | None = None

    @property
    def tokens_per_s(self) -> float:
        """The median of the runs."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    def over(self, other: Row) -> float:
        """The median over the turns of the ratio of speeds. The runs of a turn have the same prompts; prompts and the
        load of the machine vary more between turns than within one."""
        pairs = zip(self.runs, other.runs, strict=True)
        return statistics.median(run.tokens_per_s / base.tokens_per_s for run, base in pairs)

    @property
    def over_first(self) -> float:
        return self.over(self.first or self)

    @property
    def over_first_in_all(self) -> float:
        """The ratio of speeds by the time of all runs together."""
        rows = (self, self.first or self)
        num_tokens, base_tokens = (sum(run.num_tokens for run in row.runs) for row in rows)
        return (num_tokens / rows[0].seconds) / (base_tokens / rows[1].seconds)

    @property
    def seconds(self) -> float:
        """Of all runs together."""
        return sum(run.seconds for run in self.runs)

    @property
    def stats(self) -> list[SpeculationStats]:
        """Of whole answers."""
        return [answer.stats for run in self.runs for answer in run.whole]

    def total(self, name: str) -> int:
        """The sum of a field of the statistics."""
        return sum(getattr(stats, name) for stats in self.stats)

    def per_round(self, *names: str) -> float:
        """The sum of fields of the statistics, per round after the prefill of a sample."""
        return sum(map(self.total, names)) / max(1, self.total("num_rounds") - len(self.stats))

    @property
    def tokens_per_pass(self) -> float:
        """The mean over the runs; 0 if rounds are not reported."""
        return statistics.fmean(run.tokens_per_pass for run in self.runs)

    @property
    def acceptance(self) -> float:
        """The accepted share of draft tokens, without those of prompt lookup; 0 without draft tokens."""
        drafted = self.total("num_draft_tokens") - self.total("num_lookup_tokens")
        return (self.total("num_accepted_tokens") - self.total("num_accepted_lookup_tokens")) / max(1, drafted)


@dataclass(slots=True)
class Results:
    """``differing`` describes each text that is not as it must be."""

    rows: list[Row] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_compared: int = 0

    def extend(self, others: Results) -> None:
        self.rows += others.rows
        self.differing += others.differing
        self.num_compared += others.num_compared

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(row.contender for row in self.rows))

    def of(self, case: str) -> list[Row]:
        return [row for row in self.rows if row.case == case]

    def row(self, case: str, contender: str) -> Row:
        """Raises KeyError if it was not measured."""
        for row in self.rows:
            if (row.case, row.contender) == (case, contender):
                return row
        raise KeyError(case, contender)


def at_temperatures(cases: Sequence[Case], temperatures: Sequence[float]) -> list[Case]:
    """All cases at each temperature, which their names have if there are several."""
    several = len(temperatures) > 1
    return [
        replace(
            case,
            name=f"{case.name}, T = {temperature:g}".removeprefix(", ") if several else case.name,
            temperature=temperature,
            salt=f"{case.salt} at {temperature:g}",
        )
        for temperature in temperatures
        for case in cases
    ]


async def measure(cases: Sequence[Case], max_tokens: int, report: Callable[[Case, Contender], None]) -> Results:
    """Ask everything. The order of contenders rotates by one each turn. ``report`` is called after each run."""
    results = Results()
    for case in cases:
        first = Row(case.name, case.contenders[0].name)
        rows = [first, *(Row(case.name, contender.name, first=first) for contender in case.contenders[1:])]
        for turn, questions in enumerate(case.turns):
            answers: list[list[str]] = [[] for _ in questions]
            share = case.warm_up_share if turn < case.num_warm_ups else 1.0
            for step in range(max(question.num_turns for question in questions)):
                asked = [index for index, question in enumerate(questions) if step < question.num_turns]
                prompts = [questions[index].prompt_after(answers[index]) for index in asked]
                sampling = (int(share * (case.max_tokens or max_tokens)), case.temperature, 1 + 1000 * turn)
                request = Request(prompts, *sampling, case.salt, case.window)
                runs = await _by_turns(case, turn, request, report)
                _compare(case, request, runs, results)
                if turn >= case.num_warm_ups:
                    _record(rows, runs)
                for index, answer in zip(asked, runs[case.contenders[0].name].answers, strict=False):
                    answers[index].append(answer.text)
        results.rows += [row for row in rows if row.runs]
    return results


async def _by_turns(
    case: Case, turn: int, request: Request, report: Callable[[Case, Contender], None]
) -> dict[str, Run]:
    first = turn % len(case.contenders)
    runs = {}
    for contender in [*case.contenders[first:], *case.contenders[:first]]:
        case.prepare()
        runs[contender.name] = await contender.ask(replace(request, salt=f"{request.salt} of {contender.name}"))
        report(case, contender)
    return runs


def _compare(case: Case, request: Request, runs: Mapping[str, Run], results: Results) -> None:
    for contender in case.contenders:
        if not contender.same_as:
            continue
        pairs = zip(runs[contender.name].answers, runs[contender.same_as].answers, request.prompts, strict=False)
        for answer, expected, prompt in pairs:
            results.num_compared += 1
            if not answer.is_same(expected):
                results.differing.append(f"{case.name}, {contender.name}: {_shortened(prompt)}")


def _shortened(prompt: Mapping[str, Any]) -> str:
    text = prompt["chat"]["messages"][-1]["content"] if "chat" in prompt else next(iter(prompt.values()))
    return repr(text)[:60]


def _record(rows: Sequence[Row], runs: Mapping[str, Run]) -> None:
    expected = runs[rows[0].contender].answers
    for row in rows:
        run = runs[row.contender]
        row.runs.append(run)
        same = [answer.is_same(other) for answer, other in zip(run.answers, expected, strict=False)]
        row.num_same, row.num_texts = row.num_same + sum(same), row.num_texts + len(same)
