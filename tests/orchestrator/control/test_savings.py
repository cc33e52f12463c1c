"""What speculation may lose."""

from orchestrator.control.savings import PROBING, Savings


def test_they_are_spent_by_losses_and_filled_by_gains_up_to_a_limit():
    savings, losses = Savings(), 0
    begun = savings.rounds
    while savings.left:
        savings.book(-1.0)
        losses += 1
    assert losses == begun
    for _ in range(10_000):
        savings.book(PROBING)
    full = savings.rounds
    assert full > begun
    savings.book(1.0)
    assert savings.rounds == full


def test_no_more_is_owed_than_it_began_with():
    savings = Savings()
    begun = savings.rounds
    savings.book(-1e9)
    assert savings.rounds == -begun


def test_what_was_saved_covers_no_more_than_that_except_for_what_is_dearer_than_all_of_it():
    savings = Savings()
    assert savings.cover(1e9), "what is as dear is tried now and then"
    savings.book(-0.9 * savings.rounds)
    assert savings.cover(0.1)
    assert savings.cover(-1.0)
    assert not savings.cover(1.0)
    savings.book(-savings.rounds)
    assert not savings.cover(-1.0), "nothing is left"


def test_each_load_has_an_account_of_its_own():
    savings = Savings()
    begun = savings.rounds
    savings.book(100.0)
    savings.another_load(4)
    assert savings.rounds == begun, "what was gained under another load is not lost here"
    savings.book(-1.5 * begun)
    assert not savings.left
    savings.another_load(0)
    assert savings.rounds > begun, "nor is what was lost there paid here"
    savings.another_load(4)
    assert savings.rounds == -0.5 * begun, "what is owed stays owed"
