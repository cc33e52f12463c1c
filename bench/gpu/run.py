"""``python3 -m bench.gpu.run [STAGE ...]``: the cuda backend on a GPU, in under ten minutes.

Each stage runs in a process of its own with a time limit, so one that fails or hangs leaves the others. A stage prints
its table last, and writes it to $OUT/STAGE.json. Without names all stages run, in this order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu import engine, kernels

ROOT = Path(__file__).parents[2]
Rows = Sequence[dict[str, object]]

STAGES: dict[str, tuple[int, Callable[[], Rows]]] = {
    "facts": (40, kernels.facts),
    "attention": (90, kernels.attention),
    "draw": (60, kernels.coupled_draws),
    "products": (100, kernels.products),
    "passes": (150, engine.passes),
    "drafts": (60, engine.drafts),
    "company": (60, engine.company),
    "profile": (40, engine.profile),
}
"""By name: time limit in seconds, and what measures."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help=", ".join(STAGES))
    parser.add_argument("--here", action="store_true", help="run one stage in this process")
    flags = parser.parse_args()
    if unknown := set(flags.stages) - set(STAGES):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}")
    if flags.here:
        for name in flags.stages:
            show(name, STAGES[name][1]())
        return
    failed = [name for name in flags.stages or STAGES if not run(name)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(name: str) -> bool:
    """Run a stage in a process of its own. Returns whether it ended well."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "bench.gpu.run", "--here", name]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=STAGES[name][0]).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {STAGES[name][0]} s", flush=True)
        return False


def show(name: str, rows: Rows) -> None:
    """Print a table, and write it as JSON where $OUT says."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    texts = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(text[index]) for text in texts) for index in range(len(columns))]
    for text in texts:
        print("  ".join(cell.rjust(width) for cell, width in zip(text, widths, strict=True)), flush=True)
    if folder := os.environ.get("OUT"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(rows, indent=1, default=str))


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
