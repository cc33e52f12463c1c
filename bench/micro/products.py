"""``specdec bench products``: the rate at which a product of few rows reads its weight, with torch's plain layer, with
oneDNN's packed weights, and with tiles (``specdec/backends/avx512/tiled_linear.c``).

The shapes are those of a Llama with 1024 hidden features, in bfloat16. Each shape has enough weights to keep them out
of the caches between uses. The implementations take turns; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from bench.harness.command import run_benchmark
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.torch.onednn_linear import PackedLinear, can_pack

_SHAPES = {"q, o": (1024, 1024), "k, v": (256, 1024), "gate, up": (2816, 1024), "down": (1024, 2816)}
_SHAPES |= {"logits": (8192, 1024)}  # outputs, inputs
_ROWS = (2, 6, 12, 32, 256)
_WEIGHTS_BYTES = 128 << 20
_TURNS = 7


def _times(layers: list[list[Callable[[Tensor], Tensor]]], rows: Tensor) -> list[float]:
    """Median seconds of a product by each implementation in ``layers``, which hold the same weights."""
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(_TURNS):
        for kind, seconds in zip(layers, times, strict=True):
            started = time.perf_counter()
            for layer in kind:
                layer(rows)
            seconds.append((time.perf_counter() - started) / len(kind))
    return [statistics.median(seconds) for seconds in times]


@torch.inference_mode()
def main(threads: Annotated[int, typer.Option(help="threads of torch; 0: torch's default")] = 0) -> None:
    """Measure products of few rows with weights from memory, in GB of weights per second."""
    if threads:
        torch.set_num_threads(threads)
    names = ["torch"]
    one = torch.zeros(2, 2, dtype=torch.bfloat16)
    names += ["oneDNN"] * can_pack(one) + ["tiles"] * TiledLinear.takes(one)
    print(f"GB/s with {torch.get_num_threads()} threads: {', '.join(names)}")
    print("| outputs x inputs | " + " | ".join(f"{count} rows" for count in _ROWS) + " |")
    print("|" + "---|" * (1 + len(_ROWS)))
    for name, (outputs, inputs) in _SHAPES.items():
        size = outputs * inputs * one.element_size()
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(-(-_WEIGHTS_BYTES // size))]
        layers: list[list[Callable[[Tensor], Tensor]]] = [
            [lambda rows, weight=weight: torch.nn.functional.linear(rows, weight) for weight in weights]  # type: ignore
        ]
        kinds = [kind for kind, label in ((PackedLinear, "oneDNN"), (TiledLinear, "tiles")) if label in names]
        layers += [[kind(weight, None) for weight in weights] for kind in kinds]
        cells = []
        for count in _ROWS:
            seconds = _times(layers, torch.randn(count, inputs).bfloat16())
            cells.append(", ".join(f"{size / each / 1e9:.1f}" for each in seconds))
        print(f"| {outputs} x {inputs} ({name}) | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
