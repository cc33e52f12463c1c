"""A process that serves freezes what stays for the garbage collector, and lets the threads of a pass sleep."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from specdec.server.process import freeze_garbage, let_threads_sleep


class Cycle:
    """Goes at the next collection once nothing else refers to it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_later_objects_are_collected_after_the_freeze():
    gc.unfreeze()
    garbage = weakref.ref(Cycle())
    try:
        freeze_garbage()
        assert garbage() is None, "garbage would stay for ever"
        assert gc.get_freeze_count() > 1000
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("name", "value", "spins"), [("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", None)]
)
def test_the_environment_overrides_how_soon_threads_sleep(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, spins: str | None
):
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
