"""What is compared with one another: a method of drafting with the target alone, and with what vLLM does by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from bench.engines import generators
from bench.engines.serving import serving
from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.methods import ALONE, Method, with_models
from bench.harness.models import Models
from bench.harness.runner import Contender
from specdec.runner.checkpoint import Checkpoint

DEPLOYED, _INNER_DRAFT = "as-deployed", "draft-in-target"
PEERS = {
    "vllm-lookup": ("alone", "ngram"),
    "vllm-draft": ("draft_model",),
    f"vllm-{_INNER_DRAFT}": ("draft_model",),
    "torch-lookup": ("alone",),
    DEPLOYED: ("alone",),
}
"""The ways of vLLM in a comparison."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our services on an engine, with a method; those that are running have no engine."""

    name: str
    engine: str = ""
    method: Method = field(default_factory=Method)


def comparisons_of(models: Models, only: Sequence[str] = ("",)) -> list[Comparison]:
    """Those whose names begin with one of ``only``, with the first draft and the first head. Raises ValueError if there
    are none."""
    methods = with_models(replace(models, drafts=models.drafts[:1], heads=models.heads[:1]))
    of_vllm = methods | {_INNER_DRAFT: Method(f"--head={draft}") for draft in models.drafts[:1]}
    comparisons = [
        Comparison(f"{engine}-{name}", engine, method)
        for engine, of_engine in (("vllm", of_vllm), ("torch", methods))
        for name, method in of_engine.items()
    ]
    if chosen := [comparison for comparison in comparisons if comparison.name.startswith(tuple(only))]:
        return chosen
    names = ", ".join(comparison.name for comparison in comparisons)
    raise ValueError(f"no comparison begins with {' or '.join(only)}; there are {names}")


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
    ends = Checkpoint.find(models.target, "float32").info.eos_token_ids
    async with AsyncExitStack() as stack:
        if comparison.name == DEPLOYED:
            endpoint = await stack.enter_async_context(common.endpoint())
            contenders = of_services(endpoint, endpoint, num_draft_tokens, is_exact=False)
        else:
            services = serving(await stack.enter_async_context(Processes()), common, models.target, comparison.engine)
            alone, drafting = await services.endpoint(Method()), await services.endpoint(comparison.method)
            number = None if comparison.method == Method() else num_draft_tokens
            contenders = of_services(alone, drafting, number, is_exact=comparison.engine == "torch")
        for how in PEERS.get(comparison.name, ()):
            draft = models.draft if how == "draft_model" else ""
            peer = generators.running(models.target, draft, how, common.threads, num_draft_tokens, end_token_ids=ends)
            contenders.append(Contender(f"vLLM {how}", (await stack.enter_async_context(peer)).ask))
        yield contenders
