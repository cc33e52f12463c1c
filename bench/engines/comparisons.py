"""What is compared with one another: a method of drafting with the target alone, and with what vLLM does by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from bench.engines.in_vllm import InVllm
from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.methods import ALONE, Method, Serving, with_models
from bench.harness.models import Models
from bench.harness.runner import Contender
from specdec.runner.checkpoint import Checkpoint

_NGRAM, _INNER_DRAFT = "ngram", "inner-draft"
_IN_VLLM = {"lookup": "alone", _NGRAM: "ngram", "draft": "draft_model", _INNER_DRAFT: "draft_model"}
"""The way of vLLM that a method is compared with, if it has one."""
_FLAGS = {
    "torch": (),
    # The share of memory is only what vLLM asks for at its start: the KV slots are named.
    "vllm": (
        *("--vllm.enforce-eager", "--memory-fraction=0.1"),
        *("--vllm.max-num-seqs=16", "--vllm.max-model-len=2048"),
    ),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our services with an engine and a method, the target alone, and a way of vLLM (empty: none). Without an engine: a
    running deployment."""

    name: str
    engine: str
    method: Method
    in_vllm: str


def comparisons_of(models: Models, only: Sequence[str]) -> list[Comparison]:
    """All with the first draft and the first head that have a name beginning with one of ``only``. Raises ValueError if
    there are none."""
    methods = with_models(replace(models, drafts=models.drafts[:1], heads=models.heads[:1]))
    served = [(engine, name, method) for engine in ("vllm", "torch") for name, method in methods.items()]
    served += [("vllm", _NGRAM, Method())]
    served += [("vllm", _INNER_DRAFT, Method(f"--head={draft}")) for draft in models.drafts[:1]]
    comparisons = [
        Comparison(f"{engine}-{name}", engine, method, _IN_VLLM.get(name, "")) for engine, name, method in served
    ]
    chosen = [comparison for comparison in comparisons if comparison.name.startswith(tuple(only))]
    if not chosen:
        names = ", ".join(comparison.name for comparison in comparisons)
        raise ValueError(f"no comparison begins with {' or '.join(only)}, but there are {names}")
    return chosen


def of_running() -> Comparison:
    """A running deployment as it is, next to vLLM by itself."""
    return Comparison("as deployed", "", Method(), "alone")


def serving(processes: Processes, common: Common, target: str, engine: str) -> Serving:
    """Our services with an engine."""
    return Serving(processes, common, target, flags=flags_of(engine))


def flags_of(engine: str) -> tuple[str, ...]:
    """Of a model service."""
    return (f"--engine={engine}", *_FLAGS[engine])


def of_services(alone: Endpoint, drafting: Endpoint, num_draft_tokens: int | None, is_exact: bool) -> list[Contender]:
    """The target alone, with a number of draft tokens (None: without a draft), and with the chosen number.

    ``is_exact``: all give the same texts; on vLLM near ties may differ.
    """
    same_as = ALONE if is_exact else ""
    contenders = [Contender(ALONE, alone.asks(num_draft_tokens=0))]
    if num_draft_tokens is not None:
        fixed = drafting.asks(num_draft_tokens=num_draft_tokens)
        contenders.append(Contender(f"K = {num_draft_tokens}", fixed, same_as))
    return [*contenders, Contender("adaptive", drafting.asks(), same_as)]


@asynccontextmanager
async def started(
    comparison: Comparison, models: Models, common: Common, num_draft_tokens: int
) -> AsyncIterator[list[Contender]]:
    """Its contenders, the target alone first. Raises StartError."""
    ends = tuple(Checkpoint.find(models.target, "float32").info.eos_token_ids)
    async with AsyncExitStack() as stack:
        if comparison.engine:
            services = serving(await stack.enter_async_context(Processes()), common, models.target, comparison.engine)
            alone, drafting = await services.endpoint(Method()), await services.endpoint(comparison.method)
        else:
            alone = drafting = await stack.enter_async_context(common.endpoint())
        number = num_draft_tokens if comparison.method != Method() or not comparison.engine else None
        contenders = of_services(alone, drafting, number, is_exact=comparison.engine == "torch")
        if how := comparison.in_vllm:
            draft = models.draft if how == "draft_model" else ""
            vllm = InVllm(models.target, draft, how, common.threads, num_draft_tokens, ends)
            contenders.append(Contender(f"vLLM {how}", await stack.enter_async_context(vllm.running())))
        yield contenders
