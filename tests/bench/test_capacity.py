"""bench capacity: clients within a time per token, the closed form, and table models behind the real services."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from bench import capacity
from bench.harness.command import Common
from bench.harness.methods import ALONE
from testing.table_model import Device

SLOWER_AND_SLOWER = {1: 10.0, 4: 16.0, 8: 40.0}


@pytest.mark.parametrize(
    ("limit_ms", "clients"),
    [(9.9, 0), (10, 1), (13, 2.5), (16, 4), (28, 6), (40, 8), (1000, 8)],
)
def test_capacity_is_between_the_measured_numbers(limit_ms: float, clients: float) -> None:
    assert capacity.capacity(SLOWER_AND_SLOWER, limit_ms) == pytest.approx(clients)


def test_the_closed_form_is_that_of_the_paper() -> None:
    curves = capacity.Curves("20+1", "5+0.5", acceptance=0.8)
    assert curves.gain(num_clients=4, num_draft_tokens=4) == pytest.approx(1 + 4 * (5 + 4 * 0.5) / (20 + 4 * 5))


@pytest.mark.parametrize(("name", "num_at_once"), [("device", 1), ("", 2)])
def test_services_of_one_device_never_work_at_the_same_time(
    name: str, num_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for two processes: each opens the file."""
    sleep, working, counts = time.sleep, [], []

    def watched(seconds: float) -> None:
        working.append(seconds)
        counts.append(len(working))
        sleep(seconds)
        working.pop()

    monkeypatch.setattr("testing.table_model.time.sleep", watched)
    devices = [Device(lambda rows: 0.001 * rows, str(tmp_path / name) if name else "") for _ in range(2)]

    def work(device: Device) -> None:
        for _ in range(20):
            device.compute(2)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, devices))
    assert len(counts) == 40
    assert max(counts) == num_at_once


@pytest.mark.slow
def test_table_models_behind_the_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    try:
        capacity.main(
            Common(json=file, tokens=8),
            clients="1,3",
            token_ms=1000.0,
            num_draft_tokens=2,
            target_pass="2+0.1",
            draft_pass="1",
            acceptance=0.8,
            repeats=1,
        )
    except typer.Exit as exit_:
        pytest.fail(f"status {exit_.exit_code}: {capsys.readouterr().out}")
    figures = json.loads(file.read_text())
    assert figures["differing"] == []
    names = {ALONE, *(f"{place}{number}" for place in (capacity.SHARED, capacity.REMOTE) for number in ("", ", K = 2"))}
    assert set(figures["served"]) == names
    assert all(of_name["clients"] == 3 for of_name in figures["served"].values()), "nothing takes a second"
    shown = capsys.readouterr().out
    assert "1 + K t_draft / t_target is 1.69 for K = 2 and 3 clients" in shown
