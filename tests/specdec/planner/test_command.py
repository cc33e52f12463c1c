"""specdec plan on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from specdec.cli.main import app

SMALL = ["plan", "--prompt=16", "--output=12", "--max-live=8", "--streams=4", "--num-ahead-tokens=0"]
RUNNER = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})


def test_it_prints_a_row_per_number_of_targets_and_writes_all_of_it_as_json(tmp_path):
    file = tmp_path / "plan.json"
    ran = RUNNER.invoke(app, [*SMALL, "--targets=1", "--targets=300", "--cell=2", f"--json={file}"])
    assert ran.exit_code == 0, ran.output
    small, large = json.loads(file.read_text())
    assert (small["targets"], large["targets"], large["simulated_targets"], large["scale"]) == (1, 300, 2, 150.0)
    for row in (small, large):
        assert row["outcome"]["tokens_per_s"] > 0
        assert [each["drafting"]["num_draft_tokens"] for each in row["tried"]][:3] == [0, 1, 2]
        assert f"{row['outcome']['tokens_per_s'] * row['scale']:.0f}" in ran.output
    assert "so many cells of 2" in ran.output
    assert "A simulation." in ran.output


def test_one_row_comes_with_all_that_was_tried():
    ran = RUNNER.invoke(app, [*SMALL[:4], "--target-pass=5", "--draft-pass=1:1,64:2", "--rate=3"])
    assert ran.exit_code == 0, ran.output
    assert "foreseen" in ran.output


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--target-pass=fast", "'fast'"),
        ("--acceptance=1.5", "acceptance"),
        ("--spread=2", "spread"),
        ("--round-trip-ms=-1", "no time"),
        ("--targets=0", "--targets"),
        ("--rate=1", "either --rate or --streams"),
        ("--measured=/no/such", "/no/such"),
    ],
)
def test_bad_flags_exit_with_2_and_say_why(flag, words):
    ran = RUNNER.invoke(app, [*SMALL, flag])
    assert ran.exit_code == 2
    assert words in ran.output


def test_the_message_path_can_be_what_bench_rounds_measured(tmp_path):
    file, plan = tmp_path / "rounds.json", tmp_path / "plan.json"
    rows = [
        {"sequences": 64.0, "overhead_ms_p50": 20.0, "cpu_us_orchestrator": 200.0},
        {"sequences": 1.0, "overhead_ms_p50": 50.2, "cpu_us_orchestrator": 900.0},
    ]
    file.write_text(json.dumps({"rows": rows}))
    flags = ["--streams=1", "--acceptance=0", "--draft-pass=1", "--target-pass=10", "--spread=0"]
    assert RUNNER.invoke(app, [*SMALL, *flags, f"--json={plan}", f"--measured={file}"]).exit_code == 0
    [row] = json.loads(plan.read_text())
    per_token_s = row["tried"][1]["outcome"]["per_token_s"][0]
    # K = 1, and all but the last of 11 rounds draft: a step, the round trip, a pass, and the RPC overhead.
    assert per_token_s == pytest.approx(0.010 + (10 * (0.001 + 0.001 + 0.0502) + 0.0251) / 11, rel=1e-3)
