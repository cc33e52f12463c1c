"""specdec plan on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from specdec.cli.main import app

NUMBERS = (*range(1, 9), 12, 16, 24, 32, 48, 64)

RUNNER = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})


def test_it_prints_every_number_of_draft_tokens_in_80_columns_and_writes_all_of_it_as_json(tmp_path):
    file, curve = tmp_path / "plan.json", tmp_path / "curve"
    curve.write_text("1 0.02\n256 0.03\n")
    ran = RUNNER.invoke(app, ["plan", "--targets=1000", f"--curve={curve}", f"--json={file}"])
    assert ran.exit_code == 0, ran.output
    written = json.loads(file.read_text())
    rows = {(row["num_draft_tokens"], row["ahead"]): row for row in written["rows"]}
    assert rows.keys() == {(0, False)} | {(number, ahead) for number in NUMBERS for ahead in (False, True)}
    assert rows[0, False]["ms_per_token"] > 20.0
    lines = ran.output.splitlines()
    assert max(map(len, lines)) <= 80
    for (number, _), row in rows.items():
        [line] = [line for line in lines if line.startswith(f"{number:>2} ")]
        assert f" {row['tokens_per_s']:.0f} " in line
    assert f"K = {written['best']['num_draft_tokens']}" in ran.output
    assert f"drafts: {written['drafts']}" in ran.output


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--target-pass=fast", "'fast'"),
        ("--acceptance=1.5", "acceptance"),
        ("--round-trip-ms=-1", "--round-trip-ms"),
        ("--targets=0", "--targets"),
        ("--curve=/no/such", "/no/such"),
        ("--rate=1", "--rate"),
        ("--measured=/no/such", "/no/such"),
    ],
)
def test_bad_flags_exit_with_2_and_say_why(flag, words):
    ran = RUNNER.invoke(app, ["plan", flag])
    assert ran.exit_code == 2
    assert words in ran.output


def test_the_message_path_can_be_what_bench_rounds_measured(tmp_path):
    file, plan = tmp_path / "rounds.json", tmp_path / "plan.json"
    rows = [
        {"sequences": 64.0, "overhead_ms_p50": 20.0, "cpu_us_orchestrator": 200.0},
        {"sequences": 1.0, "overhead_ms_p50": 50.2, "cpu_us_orchestrator": 900.0},
    ]
    file.write_text(json.dumps({"rows": rows}))
    flags = ["--requests=1", "--acceptance=0", "--draft-pass=1", "--target-pass=10", f"--measured={file}"]
    assert RUNNER.invoke(app, ["plan", *flags, f"--json={plan}"]).exit_code == 0
    one = json.loads(plan.read_text())["rows"][1]
    # K = 1: a step, the round trip, a pass, and the RPC overhead.
    assert one["ms_per_token"] == pytest.approx(10 + 1 + 1 + 50.2)
