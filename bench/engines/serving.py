"""Our services with one engine, in float32. Knows the engines' flags."""

from __future__ import annotations

from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.methods import Serving

_FLAGS: dict[str, tuple[str, ...]] = {
    "torch": (),
    # The share of memory is only what vLLM asks for at its start: the KV slots are named.
    "vllm": (
        *("--vllm.enforce-eager", "--memory-fraction=0.1"),
        *("--vllm.max-num-seqs=16", "--vllm.max-model-len=2048"),
    ),
}


def serving(processes: Processes, common: Common, target: str, engine: str) -> Serving:
    return Serving(processes, common, target, flags=(f"--engine={engine}", *_FLAGS[engine]))
