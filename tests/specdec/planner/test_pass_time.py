"""Pass times as they are written on the command line."""

from __future__ import annotations

import pytest

from specdec.planner.pass_time import PassTime


@pytest.mark.parametrize(
    ("text", "rows", "ms"),
    [
        ("20", 1, 20),
        ("20", 1000, 20),
        ("20+0.05", 100, 25),
        ("1:20,101:30,201:60", 1, 20),
        ("1:20,101:30,201:60", 51, 25),
        ("1:20,101:30,201:60", 101, 30),
        ("1:20,101:30,201:60", 301, 90),
        ("8:20", 1, 20),
        ("8:20", 99, 20),
    ],
)
def test_lines_and_tables(text, rows, ms):
    assert PassTime.parse(text).seconds(rows) * 1e3 == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "fast", "20+x", "1:20,1:30", "1:20,2:10", "0", "-1", "1:20,2", "20+-1"])
def test_a_text_that_is_no_time_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"rows|MS|pass"):
        PassTime.parse(text)


def test_measured_passes_are_a_line_each_and_may_scatter(tmp_path):
    file = tmp_path / "curve"
    file.write_text("64,0.030\n1 0.020\n\n1 0.022\n32 0.020\n")
    curve = PassTime.read(str(file))
    assert [curve.seconds(rows) for rows in (1, 32, 48, 64)] == pytest.approx([0.021, 0.021, 0.0255, 0.030])


@pytest.mark.parametrize("text", ["", "rows seconds", "1 2 3", "1 -0.1"])
def test_a_file_that_has_no_passes_is_refused(tmp_path, text):
    file = tmp_path / "curve"
    file.write_text(text)
    for name in (file, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"ROWS SECONDS|pass"):
            PassTime.read(str(name))
