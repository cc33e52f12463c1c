"""What drafts cost the target's passes is told from the passes right after them, and from no others."""

from __future__ import annotations

import pytest

from orchestrator.control.contention import Contention

WITH_S, WITHOUT_S = 0.030, 0.020


def drafted(contention: Contention, sequences: int = 4) -> float:
    for _ in range(sequences):
        contention.asked()
    return contention.with_drafts(WITH_S, WITH_S, sequences, sequences)


def calm(contention: Contention, pass_s: float = WITHOUT_S, sequences: int = 4) -> float:
    return contention.with_drafts(pass_s, WITH_S, sequences, sequences)


def learnt() -> Contention:
    contention = Contention(ahead=True)
    for _ in range(30):
        drafted(contention)
        calm(contention, WITH_S)  # in which what was granted is used up
        for _ in range(3):
            calm(contention)
    return contention


def test_a_pass_without_drafts_right_after_some_with_drafts_tells_what_they_cost():
    contention = learnt()
    assert contention.share(4) == pytest.approx(WITHOUT_S / WITH_S, rel=0.05)
    assert drafted(contention) == WITH_S
    assert calm(contention) == pytest.approx(WITH_S, rel=0.05)


def test_where_few_of_many_draft_it_is_in_between():
    contention = learnt()
    contention.asked()
    assert WITH_S < contention.with_drafts(WITH_S, WITH_S, 4, 4) < WITH_S / contention.share(4)


def test_as_many_sequences_as_were_there_and_no_others():
    contention = learnt()
    assert contention.share(1) == contention.share(16) == 1.0


def test_a_draft_that_is_waited_for_slows_down_no_pass_that_its_sequence_is_in():
    """More rows take longer, which is no matter of who drafted before."""
    contention = Contention()
    for _ in range(30):
        assert drafted(contention) == WITH_S
        assert calm(contention) == WITHOUT_S
    assert contention.share(4) == 1.0
    assert contention.num_calm == 30, "passes without drafts are seen all the same"


def test_it_slows_down_the_others():
    contention = Contention()
    for _ in range(30):
        for _ in range(3):
            contention.asked()
            contention.with_drafts(WITH_S, WITH_S, 1, 4)
        calm(contention)
    assert contention.share(4) == pytest.approx(WITHOUT_S / WITH_S, rel=0.05)


def test_drafts_that_cost_nothing_make_no_difference_however_the_passes_vary():
    contention = Contention()
    for number in range(300):
        drafted(contention)
        calm(contention, WITH_S * (0.97, 1.05, 0.98)[number % 3])
    assert contention.share(4) == 1.0


def test_passes_long_after_a_draft_tell_nothing_of_it_and_what_was_known_fades():
    contention = learnt()
    for _ in range(20):
        calm(contention, WITH_S / 10)
    assert contention.share(4) == pytest.approx(WITHOUT_S / WITH_S, rel=0.1)
    for _ in range(3000):
        calm(contention)
    assert contention.share(4) == 1.0


def test_nothing_is_learnt_where_it_is_not_known_what_a_pass_takes_as_a_rule():
    contention = Contention()
    drafted(contention)
    contention.with_drafts(WITHOUT_S, None, 4, 4)
    assert contention.share(4) == 1.0
    assert contention.num_calm == 1


def test_a_draft_that_grows_ahead_goes_on_for_a_pass_after_it_was_asked_for_the_last_time():
    contention = Contention(ahead=True)
    for _ in range(30):
        drafted(contention)
        calm(contention, WITH_S)
        calm(contention)
    assert contention.share(4) == pytest.approx(WITHOUT_S / WITH_S, rel=0.05)
    assert contention.num_calm == 30


def test_slower_passes_with_drafts_tell_nothing_of_those_without():
    contention = Contention(ahead=True)
    drafted(contention)
    contention.slower(1.25, 4)
    assert contention.share(4) == pytest.approx(0.8, rel=0.05)
    contention.slower(1 / 1.25, 4)
    contention.slower(1 / 1.25, 4)
    assert contention.share(4) == 1.0, "drafts make nothing faster"


def test_small_changes_of_passes_with_drafts_are_noise():
    contention = Contention()
    drafted(contention)
    for _ in range(100):
        contention.slower(1.008, 4)
    assert contention.share(4) == 1.0


def test_a_slower_pass_without_drafts_is_a_slower_target():
    contention = Contention()
    drafted(contention)
    calm(contention, WITH_S)
    contention.slower(1.25, 4)
    assert contention.share(4) == 1.0


def test_what_is_looked_for_in_vain_is_believed_less_and_less():
    contention = learnt()
    for _ in range(8):
        contention.unseen(4)
    assert contention.share(4) == 1.0


def test_what_was_asked_before_a_pass_that_tells_nothing_does_not_make_the_next_one_of_drafts():
    contention = Contention()
    drafted(contention)
    for _ in range(4):
        contention.asked()
    contention.overlooked()
    calm(contention)
    assert contention.num_calm == 1
