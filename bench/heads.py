"""``specdec bench heads``: tokens per pass and time of a target that drafts by itself, by the number of nodes: trees,
and chains of as many.

One sequence in one process, so that only the head differs. The default questions are of other kinds than those that
the bundled head was trained on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from bench.harness.command import Common, run_comparison
from bench.harness.models import Models, PairName
from bench.harness.questions import Question
from bench.harness.report import USUAL_COLUMNS, USUAL_LEGEND, Say, by_case, compare, conditions, finish, heat_of
from bench.harness.runner import Answer, Ask, Case, Contender, Request, Run, at_temperatures
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.settings import ModelServiceSettings
from specdec.runner.files import directory_of
from specdec.runner.loading import load_runner
from specdec.v1.generation_pb2 import SpeculationStats
from target_service.heads.checkpoint import read_head
from target_service.heads.proof import proved
from target_service.language_model import LmVerifier
from target_service.self_draft.by_name import self_drafter
from target_service.self_draft.trees import SelfDraftTrees
from target_service.verifier import Decision, Job

_TOKENS = 64
_QUESTIONS = (
    "My neighbour plays loud music every night. How should I talk to him?",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain.",
    "I have three eggs, flour and milk. What can I cook tonight?",
    "Plan a weekend in a city by the sea for two people who like walking.",
    "Why do we dream? Answer like a scientist, then like a grandmother.",
    "Write a function that counts the vowels of a word.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey?",
    "Turn this into a list: we need apples, a new broom, two light bulbs and bread.",
)


def in_process(verifier: LmVerifier, tokenizer: Any, num_nodes: int) -> Ask:
    """One sequence at a time, with trees of so many nodes. A run is what comes after the first pass, of the prompt."""

    async def ask(request: Request) -> Run:
        [prompt] = request.prompts
        start = _ids(tokenizer, prompt)
        sampling = SamplingParams(request.temperature)
        spec = SequenceSpec(start, len(start), sampling, request.seed, Method.COUPLED, request.salt.encode())
        open_, state = TargetOpen(spec, max_self_draft_nodes=num_nodes), verifier.open(spec)
        ids, passes, started = list(start), 0, 0.0
        while len(ids) < len(start) + request.max_tokens:
            [decision], _ = verifier.verify([Job(open_, state, ids, self_draft_nodes=num_nodes)])
            if not isinstance(decision, Decision):
                assert decision is None, decision
                continue
            ids += [*(decision.self_draft.token_ids[node] for node in decision.accepted), decision.next_token]
            passes += 1
            started = started or time.perf_counter()
        seconds = time.perf_counter() - started
        verifier.close(state)
        new = ids[len(start) : len(start) + request.max_tokens]
        return Run(seconds, [Answer(new[1:], tokenizer.decode(new), SpeculationStats(num_rounds=passes - 1))])

    return ask


def _ids(tokenizer: Any, prompt: Mapping[str, Any]) -> list[int]:
    if "text" in prompt:
        return list(tokenizer(prompt["text"])["input_ids"])
    messages = prompt["chat"]["messages"]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def contenders_of(models: Models, common: Common, self_draft: str, nodes: list[int]) -> list[Contender]:
    """The target alone, and trees and chains of nodes. Raises ValueError for a head that cannot be used."""
    if not (models.heads or self_draft):
        raise ValueError("this needs a head of the target (--head), or a method without one (--self-draft)")
    directory = directory_of(models.target)
    settings = {"model": str(directory), "kv_slots": 4096, "dtype": common.dtype or "auto", "threads": common.threads}
    runner = load_runner(ModelServiceSettings.model_validate(settings))
    if self_draft:
        drafter = self_drafter(self_draft, runner.info.vocab_size)
    else:
        drafter = proved(read_head(Path(models.heads[0])), runner)
    verifier, tokenizer = LmVerifier(runner, drafter), AutoTokenizer.from_pretrained(directory)
    contenders = [Contender("target alone", in_process(verifier, tokenizer, 0))]
    # A chain is the static tree of first guesses.
    shapes = {"nodes": verifier}
    if isinstance(drafter, SelfDraftTrees):
        shapes["in a chain"] = LmVerifier(runner, SelfDraftTrees(drafter.head, [[0] * max(nodes)]))
    for number in nodes:
        for shape, of_shape in shapes.items():
            ask = in_process(of_shape, tokenizer, number)
            contenders.append(Contender(f"{number} {shape}", ask, contenders[0].name))
    return contenders


def main(
    common: Common,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="of a tree; may be repeated [default: 2, 4, 8]")
    ] = None,
    self_draft: Annotated[
        str, typer.Option(metavar="NAME", help="instead of a head: lookup, recycling, or lookahead:W,N,G")
    ] = "",
) -> None:
    """Tokens per pass and speed of a target that drafts by itself, by the number of nodes, in trees and in chains.

    Default models: smollm2 with its head, in one process. Of a running deployment: by the number of draft tokens.
    """
    numbers, max_tokens = nodes or [2, 4, 8], common.tokens or _TOKENS
    own_questions = [Question("", (text,)) for text in _QUESTIONS]

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        asked = common.asked(per_task=1) if common.questions else own_questions
        turns = [[question] for question in asked]
        temperatures = common.temperature or [0.0, 1.0]
        if common.is_running:
            say(conditions("a running deployment", max_tokens))
            async with common.endpoint() as endpoint:
                contenders = [Contender("target alone", endpoint.asks(num_draft_tokens=0))]
                for number in numbers:
                    contender = endpoint.asks(num_draft_tokens=number)
                    contenders.append(Contender(f"{number} draft tokens", contender, contenders[0].name))
                yield at_temperatures([Case("", turns, contenders)], temperatures)
            return
        models = common.models(PairName.smollm2, directory)
        say(conditions(models.label, max_tokens))
        yield at_temperatures([Case("", turns, contenders_of(models, common, self_draft, numbers))], temperatures)

    results = compare(prepare, max_tokens)
    tables = {"By the number of nodes": by_case(results, USUAL_COLUMNS)}
    chart = heat_of("Speed over the target alone", results, but="target alone")
    finish(common, results, tables, chart, USUAL_LEGEND)


if __name__ == "__main__":
    run_comparison(main, "draft")
