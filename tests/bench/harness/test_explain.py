"""What the services of a run did meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness import explain
from bench.harness.deployment import Processes
from bench.harness.runner import Answer, Request, Row, Run
from specdec.v1.generation_pb2 import SpeculationStats


def shown(*runs: Run) -> list[str]:
    row = Row("1", "draft", list(runs))
    return [show(row) for show in explain.COLUMNS.values()]


def test_busy_times_are_shares_of_the_wall_time_and_cpu_is_per_round() -> None:
    answers = [Answer([1, 2], stats=SpeculationStats(num_rounds=5))]
    used_s = {"target busy": 1.5, "target CPU": 1e-3, "orchestrator CPU": 2e-3}
    assert shown(Run(2.0, answers, used_s), Run(2.0, answers, used_s)) == ["0.75", "0.25", "", "200", "", "400"]
    assert shown(Run(2.0, answers, used_s | {"draft busy": 1.0, "draft CPU": 0.0}))[2:5] == ["0.50", "200", "0"]
    assert shown(Run(2.0, answers)) == [""] * 6


@pytest.mark.slow
async def test_the_busy_time_of_a_model_is_that_of_its_passes() -> None:
    request = Request([{"token_ids": {"token_ids": [1, 2, 3]}}], 12, 0.0, 1, "")
    commands: list[Any] = [(f"testing.table_service {role}", "--pass-ms=5") for role in ("target", "draft")]
    async with Processes(with_metrics=True) as processes:
        endpoint = await explain.endpoint_of(processes, *commands, salted=False)
        alone = await endpoint.asks(num_draft_tokens=0)(request)
        drafting = await endpoint.asks(num_draft_tokens=3)(request)
    assert alone.used_s["target busy"] >= 12 * 5e-3
    assert 0 == alone.used_s["draft busy"] < drafting.used_s["draft busy"]
    assert {f"{name} CPU" for name in ("target", "draft", "orchestrator")} <= alone.used_s.keys()
