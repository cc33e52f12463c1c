"""``specdec bench peers``: our services and transformers, on the same checkpoints and prompts, by turns, greedy.

transformers generates for one request alone and with assisted generation, and for several in a padded batch. Prompts
are windows of a text, equally long, so that padding costs nothing. transformers runs in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.harness.command import Common, Dtype, run_comparison
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.methods import Method, Serving
from bench.harness.models import Models, PairName
from bench.harness.report import USUAL_COLUMNS, Say, by_case, compare, conditions, finish, heat_of
from bench.harness.runner import Answer, Ask, Case, Contender, Request, Results, Row, Run
from bench.harness.windows import Windows, windows_of
from specdec.runner.files import directory_of

ASSISTED_DRAFT_TOKENS = (4, 6, 8, 10)
ALONE, OURS = "specdec, target alone", "specdec"
PEERS = "transformers"
PROMPT_TOKENS, _TOKENS = 64, 64
LEGEND = (
    "K: of assisted generation; over best, over alone: medians over the turns of the speed over the fastest of"
    " transformers', and over our target alone; drafted: draft tokens a round, without prompt lookup; same: texts as"
    " those of transformers"
)


class TransformersPair:
    """Target and draft, loaded by transformers in this process."""

    def __init__(self, target: str, draft: str | None, dtype: str) -> None:
        transformers.logging.set_verbosity(logging.ERROR)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.target = self._loaded(target, dtype)
        self.draft = self._loaded(draft, dtype) if draft else None
        if self.draft is not None:
            # A fixed number of draft tokens, independent of earlier acceptance and of the draft's confidence.
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"
            self.draft.generation_config.assistant_confidence_threshold = 0.0
        end = self.target.generation_config.eos_token_id
        self.end_token_ids: list[int] = [] if end is None else end if isinstance(end, list) else [end]

    @staticmethod
    def _loaded(model: str, dtype: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(directory_of(model), dtype=getattr(torch, dtype))

    def contenders(self, num_requests: int) -> list[Contender]:
        if num_requests > 1:
            return [Contender(f"{PEERS}, padded batch", self._ask(None))]
        assisted = ASSISTED_DRAFT_TOKENS if self.draft is not None else ()
        alone = Contender(PEERS, self._ask(None))
        return [alone, *(Contender(f"{PEERS}, K = {number}", self._ask(number)) for number in assisted)]

    def _ask(self, num_draft_tokens: int | None) -> Ask:
        async def ask(request: Request) -> Run:
            prompts = [list(prompt["token_ids"]["token_ids"]) for prompt in request.prompts]
            started = time.perf_counter()
            outputs = self.generate(prompts, request.max_tokens, num_draft_tokens)
            return Run(time.perf_counter() - started, [Answer(ids) for ids in outputs])

        return ask

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, num_draft_tokens: int | None = None
    ) -> list[list[int]]:
        """Greedy texts of equally long prompts, before their first end token; assisted unless the number is None."""
        options: dict[str, Any] = {}
        if num_draft_tokens is not None and self.draft is not None:
            self.draft.generation_config.num_assistant_tokens = num_draft_tokens
            options["assistant_model"] = self.draft
        inputs = torch.tensor(prompts)  # [requests, prompt length]
        output: Tensor = self.target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=(self.end_token_ids or [0])[0],
            **options,
        )
        return [before_end(ids, self.end_token_ids) for ids in output[:, inputs.shape[1] :].tolist()]

    @torch.inference_mode()
    def acceptance(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> float:
        """How often the draft's most likely token is the target's token, over greedy outputs of the target."""
        assert self.draft is not None
        num_right, total = 0, 0
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.draft(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits
            guesses = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            num_right += sum(guess == token for guess, token in zip(guesses, output, strict=True))
            total += len(output)
        return num_right / total


def before_end(output: Sequence[int], end_token_ids: Sequence[int]) -> list[int]:
    """The output before its first end token: others also return that token and its padding."""
    end = next((index for index, token in enumerate(output) if token in end_token_ids), len(output))
    return list(output[:end])


def case_of(num_requests: int, theirs: TransformersPair, ours: Endpoint, windows: Windows, repeats: int) -> Case:
    """After one turn that warms up, in which the policy learns."""
    turns = [windows.questions(num_requests, PROMPT_TOKENS) for _ in range(1 + repeats)]
    alone, speculating = Contender(ALONE, ours.asks(num_draft_tokens=0)), Contender(OURS, ours.asks(), ALONE)
    name = "1 request" if num_requests == 1 else f"{num_requests} requests"
    return Case(name, turns, [*theirs.contenders(num_requests), alone, speculating], num_warm_ups=1, salt=name)


def columns(results: Results) -> Mapping[str, Callable[[Row], str]]:
    """Our speed over the fastest of transformers in the case, and over our target alone."""

    def over_best(row: Row) -> str:
        peers = [peer for peer in results.of(row.case) if peer.contender.startswith(PEERS)]
        if row in peers:
            return ""
        return f"{row.over(max(peers, key=lambda peer: peer.tokens_per_s)):.2f} x"

    def over_alone(row: Row) -> str:
        return f"{row.over(results.row(row.case, ALONE)):.2f} x" if row.contender == OURS else ""

    ours = {"tokens/s": USUAL_COLUMNS["tokens/s"], "over best": over_best, "over alone": over_alone}
    return {**ours, **{name: USUAL_COLUMNS[name] for name in ("drafted", "accepted", "same")}}


def main(
    common: Common,
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,4,16,32",
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 3,
) -> None:
    """Tokens per second of our services and of transformers on the same models, by the number of requests.

    Default models: damped, in bfloat16, where near ties may differ from transformers. A running deployment needs
    --target, for transformers.
    """
    dtype, max_tokens = common.dtype or Dtype.bfloat16, common.tokens or _TOKENS
    common = replace(common, dtype=dtype)

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        models = common.models_of_both(PairName.damped, directory)
        say(conditions(f"{models.label}; {dtype}", max_tokens))
        torch.set_num_threads(common.threads)
        windows = windows_of(common, models)
        theirs = TransformersPair(models.target, models.drafts[0] if models.drafts else None, dtype)
        if theirs.draft is not None:
            sample = windows.take(2, PROMPT_TOKENS)
            rate = theirs.acceptance(sample, theirs.generate(sample, max_tokens))
            say(f"greedy acceptance of the draft's first token: {rate:.2f}")
        async with AsyncExitStack() as stack:
            ours = await stack.enter_async_context(common.endpoint() if common.is_running else _served(models, common))
            numbers = [int(number) for number in requests.split(",")]
            yield [case_of(number, theirs, ours, windows, repeats) for number in numbers]

    results = compare(prepare, max_tokens)
    chart = heat_of("Speed over transformers' generate", results)
    finish(common, results, {"Tokens per second, greedy": by_case(results, columns(results))}, chart, LEGEND)


@asynccontextmanager
async def _served(models: Models, common: Common) -> AsyncIterator[Endpoint]:
    async with Processes() as processes:
        draft, head = next(iter(models.drafts), ""), next((f"--head={head}" for head in models.heads), "")
        yield await Serving(processes, common, models.target).endpoint(Method(head, draft))


if __name__ == "__main__":
    run_comparison(main, "temperature")
