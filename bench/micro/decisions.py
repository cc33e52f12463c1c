"""``specdec bench decisions``: the cost of the decisions of a pass (logits -> accepted nodes and tokens), without it.

Random logits in bfloat16, one thread, CPU time. The best of several runs, which excludes other load on the machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from bench.harness.command import run_benchmark
from specdec.backends.base import Backend
from specdec.backends.choice import choose
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.state import SamplingState
from target_service.decision import decide
from target_service.verifier import Job

_REPETITIONS = 15
_KINDS = {
    "greedy": SamplingParams(0.0),
    "greedy, penalties": SamplingParams(0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "temperature 1": SamplingParams(1.0),
    "temperature 0.6": SamplingParams(0.6),
    "top_k 40": SamplingParams(0.7, 40),
    "top_p 0.9": SamplingParams(0.7, 0, 0.9),
    "min_p 0.05": SamplingParams(1.0, 0, 1.0, 0.05),
}
_SHAPES = ((1, 1), (1, 9), (16, 6))  # sequences, rows each
_VOCAB_SIZES = (8192, 32_000)
_PROMPT = tuple(range(500))


@dataclass
class _Memory:
    sampling: SamplingState


def _best_us(params: SamplingParams, backend: Backend, num_sequences: int, num_rows: int, vocab_size: int) -> float:
    generator = torch.Generator().manual_seed(1)
    logits = [(3 * torch.randn(num_rows, vocab_size, generator=generator)).bfloat16() for _ in range(num_sequences)]
    sound = torch.ones(num_rows, dtype=torch.bool)
    outputs = [PassOutputs(each, each, sound).as_one() for each in logits]
    tree = TokenTree.chain(range(num_rows - 1))
    times = []
    for _ in range(_REPETITIONS):
        specs = [SequenceSpec(_PROMPT, len(_PROMPT), params, seed) for seed in range(num_sequences)]
        jobs = [Job(_Memory(SamplingState(spec)), spec.token_ids, tree) for spec in specs]
        started = time.process_time()
        decide(jobs, outputs, backend)
        times.append(time.process_time() - started)
    return min(times) * 1e6


def main() -> None:
    """Measure the cost of decisions by sampling parameters, in microseconds."""
    torch.set_num_threads(1)
    backend = choose("auto", torch.device("cpu"))
    columns = [(*shape, vocab_size) for shape in _SHAPES for vocab_size in _VOCAB_SIZES]
    heads = [f"{sequences} x {rows}, {vocab}" for sequences, rows, vocab in columns]
    print("| us | " + " | ".join(heads) + " |")
    print("|" + "---|" * (1 + len(columns)))
    for name, params in _KINDS.items():
        print(
            f"| {name} | " + " | ".join(f"{_best_us(params, backend, *column):.0f}" for column in columns) + " |",
            flush=True,
        )


if __name__ == "__main__":
    run_benchmark(main)
