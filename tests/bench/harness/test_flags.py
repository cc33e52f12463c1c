"""The flags that all comparisons share: the same everywhere, and contradictions are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from bench.harness.command import Common, with_common_flags
from bench.harness.models import Models, PairName, named
from specdec.cli.processes import StartError
from tests.checkout import DEMO

GIVEN: list[tuple[Common, int]] = []


def benchmark(common: Common, special: Annotated[int, typer.Option(help="of its own")] = 3) -> None:
    """Measure something."""
    GIVEN.append((common, special))


def called(*arguments: str, without: tuple[str, ...] = ()) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(with_common_flags(benchmark, without))
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, arguments)


def test_every_flag_is_there_but_those_without_a_use() -> None:
    shown = called("--help").stdout
    for name in [each.name for each in fields(Common)] + ["special"]:
        assert f"--{name.replace('_', '-')} " in shown, name
    assert max(map(len, shown.splitlines())) <= 80
    assert "Measure something." in shown
    assert "--head" not in called("--help", without=("head",)).stdout


def test_flags_reach_the_benchmark() -> None:
    GIVEN.clear()
    flags = ["--target", "T", "--draft", "A", "--draft", "B", "--head", "H", "--tokens", "5", "--special", "7"]
    assert called(*flags, "--temperature", "0", "--temperature", "1").exit_code == 0
    [(common, special)] = GIVEN
    models = common.models(PairName.demo, Path())
    assert models == Models("T", "T", ("A", "B"), ("H",))
    assert (common.tokens, common.temperature, special) == (5, [0.0, 1.0], 7)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--url", "U", "--address", "A"], "one of --url and --address, not both"),
        (["--target", "T", "--pair", "demo"], "one of --target and --pair, not both"),
        (["--draft", "D"], "--draft and --head need a --target"),
        (["--pair", "demo", "--url", "U"], "--url names a running deployment"),
    ],
)
def test_contradictions_are_refused(flags: list[str], why: str) -> None:
    ran = called(*flags)
    assert ran.exit_code == 2
    assert why in " ".join(ran.stderr.replace("│", " ").split())


def test_without_models_the_default_pair_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Common().models(PairName.demo, tmp_path).target == str(DEMO / "target")
    assert Common(pair=PairName.demo).models(PairName.smollm2, tmp_path).drafts == (str(DEMO / "draft"),)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StartError, match=r"there is no .*smollm2.*: `specdec fetch smollm2` makes it"):
        Common().models(PairName.smollm2, tmp_path)
    with pytest.raises(StartError, match="table models have no text"):
        Common(pair=PairName.table).models(PairName.smollm2, tmp_path)
    with pytest.raises(StartError, match="needs its model, too: --target"):
        Common(url="http://127.0.0.1:8000").models_of_both(PairName.damped, tmp_path)


def test_models_are_named_by_their_folders_unless_two_have_one_name() -> None:
    assert named(["/a/head", "/a/medusa"]) == {"head": "/a/head", "medusa": "/a/medusa"}
    assert named(["/a/draft", "/b/draft"]) == {"/a/draft": "/a/draft", "/b/draft": "/b/draft"}
