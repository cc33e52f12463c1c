"""``python -m bench.peers.logged_service target_service --pass-log FILE ...``: a model service as anybody starts it,
with the same flags, that also writes down when it computed, and reuses no prefix while FILE.reuse is absent.

Knows the methods that are a pass and a new cache; refuses to know the rest of the service.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.pass_log import Pass, now, write_pass
from bench.peers.unshared import share_nothing_unless
from specdec.model_runner import ModelRunner, RowOutputs
from specdec.packed_rows import Segment

_FLAG = "--pass-log="


def reuse_flag(log: Path) -> Path:
    return log.with_suffix(".reuse")


def main() -> None:
    name, *arguments = sys.argv[1:]
    [log] = [argument.removeprefix(_FLAG) for argument in arguments if argument.startswith(_FLAG)]
    sys.argv = [name, *(argument for argument in arguments if not argument.startswith(_FLAG))]
    share_nothing_unless(reuse_flag(Path(log)).exists)
    forward = ModelRunner.forward
    with open(log, "ab", buffering=0) as file:

        def logged(runner: ModelRunner, segments: Sequence[Segment]) -> list[RowOutputs]:
            started = now()
            logits = forward(runner, segments)
            write_pass(file, Pass(started, now(), sum(len(segment.token_ids) for segment in segments)))
            return logits

        ModelRunner.forward = logged  # type: ignore[method-assign, assignment]
        runpy.run_module(name, run_name="__main__")


if __name__ == "__main__":
    main()
