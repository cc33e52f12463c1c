"""A process that serves keeps the collector away from what is there to stay."""

from __future__ import annotations

import gc
import weakref

from specdec.server.garbage import settle


class Thing:
    """Something that can be in a cycle."""


def test_what_is_there_is_not_looked_at_again_and_what_comes_later_is():
    gc.unfreeze()
    garbage = Thing()
    garbage.itself = garbage
    gone = weakref.ref(garbage)
    del garbage
    try:
        settle()
        assert gone() is None, "garbage would stay for ever"
        num_settled = gc.get_freeze_count()
        assert num_settled > 1000
        later = Thing()
        later.itself = later
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()
