"""``python -m bench.peers.logged_service target_service --pass-log FILE ...``: an ordinary model service, with the same
flags, that also logs the times of its passes.

Knows the method that runs a pass; does not know the rest of the service.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from bench.peers.pass_log import Pass, now, write_pass
from specdec.passes.rows import Segment
from specdec.server.process import let_threads_sleep

_FLAG = "--pass-log="


def main() -> None:
    name, *arguments = sys.argv[1:]
    [log] = [argument.removeprefix(_FLAG) for argument in arguments if argument.startswith(_FLAG)]
    sys.argv = [name, *(argument for argument in arguments if not argument.startswith(_FLAG))]
    let_threads_sleep()  # must precede the import of torch, as in a service
    from specdec.runner.model_runner import ModelRunner

    forward = ModelRunner.forward
    with open(log, "ab", buffering=0) as file:

        def logged(runner: ModelRunner, segments: Sequence[Segment]) -> list[Any]:
            started = now()
            logits = forward(runner, segments)
            write_pass(file, Pass(started, now(), sum(len(segment.token_ids) for segment in segments)))
            return logits

        ModelRunner.forward = logged  # type: ignore[method-assign, assignment]
        runpy.run_module(name, run_name="__main__")


if __name__ == "__main__":
    main()
