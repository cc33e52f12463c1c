"""Which rounds still get verdicts, after everything that is sent and received, and which verdicts are valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.request import OutputOptions
from orchestrator.sequence import Sequence
from orchestrator.verifying.rounds_in_flight import RoundsInFlight
from specdec.core.rounds import Logprobs, Round, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.models.fake_peers import new_request, new_sequence

chain = TokenTree.chain
OPENED = RoundsInFlight.opened(7)
IDLE = RoundsInFlight(sent=4, answered=4)
TREE, EARLY, PLAIN = Round(5, 7, chain([1, 2])), Round(6, 7, chain([1, 2, 3]), max_nodes=2), Round(6, 7)
AUTONOMOUS = Round(5, 7, num_autonomous=8, self_draft_nodes=3)


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (OPENED, Verdict(0, 7, (), 9), RoundsInFlight()),
        (IDLE, TREE, RoundsInFlight((TREE,), 5, 4)),
        (RoundsInFlight((TREE,), 5, 4), Verdict(5, 7, (0,), 9), RoundsInFlight((), 5, 5)),
        # A round is sent early, and then it is the next one, or was never sent.
        (RoundsInFlight((TREE,), 5, 4), EARLY, RoundsInFlight((TREE, EARLY), 6, 4)),
        (RoundsInFlight((TREE, EARLY), 6, 4), Verdict(5, 7, (0,), 2), RoundsInFlight((EARLY,), 6, 5)),
        (RoundsInFlight((TREE, EARLY), 6, 4), Verdict(5, 7, (), 9, dropped_round=6), RoundsInFlight((), 5, 5)),
        (RoundsInFlight((EARLY,), 6, 5), Verdict(6, 9, (2,), 9), RoundsInFlight((), 6, 6)),
        # What is left of an allowance follows each verdict, and a later round supersedes it.
        (
            RoundsInFlight((AUTONOMOUS,), 5, 4),
            Verdict(5, 7, (), 9, num_autonomous_left=8),
            RoundsInFlight((Round(5, 8, num_autonomous=7, self_draft_nodes=3),), 5, 5),
        ),
        (
            RoundsInFlight((Round(5, 8, num_autonomous=7, self_draft_nodes=3),), 5, 5),
            Verdict(5, 8, (0, 1), 9, num_autonomous_left=5),
            RoundsInFlight((Round(5, 11, num_autonomous=4, self_draft_nodes=3),), 5, 5),
        ),
        (RoundsInFlight((AUTONOMOUS,), 5, 5), PLAIN, RoundsInFlight((AUTONOMOUS, PLAIN), 6, 5)),
        (
            RoundsInFlight((AUTONOMOUS, PLAIN), 6, 5),
            Verdict(5, 7, (), 9, num_autonomous_left=2),
            RoundsInFlight((Round(5, 8, num_autonomous=1, self_draft_nodes=3), PLAIN), 6, 5),
        ),
        (RoundsInFlight((AUTONOMOUS, PLAIN), 6, 5), Verdict(6, 7, (), 9), RoundsInFlight((), 6, 6)),
        (RoundsInFlight((AUTONOMOUS,), 5, 5), Verdict(5, 7, (), 9), RoundsInFlight((), 5, 5)),
    ],
)
def test_transitions(before: RoundsInFlight, event: Round | Verdict, after: RoundsInFlight) -> None:
    assert (before.after_round(event) if isinstance(event, Round) else before.after_verdict(event)) == after


@pytest.mark.parametrize(
    ("state", "base", "num_left", "pipelined"),
    [
        (RoundsInFlight(), 7, 0, False),
        (RoundsInFlight((EARLY,), 6, 5), 9, 0, True),
        (RoundsInFlight((AUTONOMOUS,), 5, 5), 7, 9, False),
        (RoundsInFlight((AUTONOMOUS,), 5, 5), 10, 6, False),
        (RoundsInFlight((AUTONOMOUS, PLAIN), 6, 5), 9, 1, False),
    ],
)
def test_what_follows_without_a_further_round(state: RoundsInFlight, base: int, num_left: int, pipelined: bool) -> None:
    assert (state.num_autonomous_left(base), state.pipelined) == (num_left, pipelined)


@pytest.mark.parametrize(
    ("base", "num_autonomous", "renews"),
    [(7, 8, False), (11, 10, True), (11, 8, False), (11, 3, False), (11, 2, True), (7, 0, True), (14, 0, False)],
)
def test_an_allowance_is_renewed_when_half_of_it_is_left_or_too_much(
    base: int, num_autonomous: int, renews: bool
) -> None:
    answered = RoundsInFlight((AUTONOMOUS,), sent=5, answered=5)
    assert answered.renews(base, num_autonomous) == renews
    assert not RoundsInFlight((AUTONOMOUS, PLAIN), sent=6, answered=5).renews(base, num_autonomous)


def test_a_round_that_supersedes_another_decides_how_many_verdicts_follow() -> None:
    verdict = Verdict(5, 7, (), 9, num_autonomous_left=4)
    superseded = RoundsInFlight((AUTONOMOUS, PLAIN), sent=6, answered=5)
    assert superseded.after_verdict(verdict).with_num_left(verdict).num_autonomous_left == 1
    assert OPENED.with_num_left(verdict) == verdict
    assert RoundsInFlight((TREE, EARLY), 6, 4).with_num_left(verdict) == verdict


SENT = chain([5, 6, 7, 8, 9])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Verdict(1, 3, (0,), 6, dropped_round=3), None),
        (Verdict(1, 3, (0,), 6), Verdict(2, 5, (1,), 0)),  # already walked along
        (Verdict(1, 3, (0,), 6), Verdict(2, 5, (2, 3, 4), 0)),  # more than were to be verified
        (Verdict(1, 3, (0,), 6), Verdict(2, 5, (3,), 0)),  # no path
        (Verdict(1, 3, (0,), 6), Verdict(2, 5, (), 0, dropped_round=2)),
        (Verdict(1, 3, (0,), 1), Verdict(2, 5, (2,), 0)),  # nothing was left
        (Verdict(1, 4, (0,), 6), None),  # another base
        (Verdict(3, 3, (0,), 6), None),  # another round
        (Verdict(1, 3, (0,), 6, num_autonomous_left=1), None),
        (Verdict(1, 3, (0,), 6, refused=True), None),
        (Verdict(1, 3, (0,), 6, logprobs=Logprobs([0.0, 0.0])), None),
        (Verdict(1, 3, (0,), 6, self_draft=chain([5])), None),
    ],
)
def test_what_cannot_be_is_a_problem(first: Verdict, second: Verdict | None) -> None:
    sequence = new_sequence()
    sequence.extend(EMPTY_TREE, Verdict(0, 2, (), 4))
    rounds = RoundsInFlight((Round(1, 3, chain([5])), Round(2, 3, SENT, max_nodes=2)), sent=2)

    def problem(verdict: Verdict, tree: TokenTree) -> str:
        return rounds.problem(verdict, sequence, rounds.accepted_nodes(verdict, sequence, tree))

    if second is None:
        assert problem(first, chain([5]))
        return
    assert not problem(first, chain([5]))
    sequence.extend(chain([5]), first)
    rounds = rounds.after_verdict(first)
    assert problem(second, SENT.descend(sequence.ids[3:]).prefix(2))


def test_accepted_nodes_are_those_of_what_is_left_of_the_tree() -> None:
    sequence = new_sequence()
    for token_id in (4, 5, 6):
        sequence.extend(EMPTY_TREE, Verdict(1, sequence.base, (), token_id))
    rounds = RoundsInFlight((Round(2, 3, SENT, max_nodes=2),), sent=2)
    left = SENT.descend(sequence.ids[3:]).prefix(2)
    assert rounds.accepted_nodes(Verdict(2, 5, (2, 3), 0), sequence, left) == (0, 1)


@pytest.mark.parametrize(
    ("logprobs", "is_valid"),
    [
        (Logprobs([-1.0, -1.0], [1, 2] * 2, [-1.0] * 4), True),
        (Logprobs([-1.0, -1.0], [1] * 2, [-1.0] * 2), True),  # a small vocabulary
        (Logprobs([-1.0], [1, 2], [-1.0] * 2), False),
        (Logprobs([-1.0, -1.0], [1, 2, 3] * 2, [-1.0] * 6), False),
        (None, False),
    ],
)
def test_a_verdict_has_the_logprobs_that_were_requested(logprobs: Logprobs | None, is_valid: bool) -> None:
    sequence = Sequence(replace(new_request(), output=OutputOptions(num_logprobs=2)))
    rounds, verdict = RoundsInFlight((Round(1, 2, chain([5])),), sent=1), Verdict(1, 2, (0,), 6, logprobs=logprobs)
    assert is_valid is not bool(rounds.problem(verdict, sequence, (0,)))
