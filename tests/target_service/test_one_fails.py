"""One sequence's exception fails one sequence of a target, wherever it is raised: the texts of the others stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from specdec.core.errors import InvalidArgument, PassFailed, SpecdecError
from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.sampling.logits_processors import Transforms
from specdec.sampling.state import SamplingState
from specdec.server.step_loop import Key
from target_service import reports
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.self_draft.recycling import Recycling
from target_service.self_draft.trees import SelfDraftTrees
from tests.models.table_runner import TableRunner

GUILTY, SEED = Key(1, 9), 666
"""The sequence under which something raises, and its seed, by which it is known."""

VOCAB, TOP = 12, 5
PARAMS = [SamplingParams(0.0), SamplingParams(0.9, presence_penalty=0.3), SamplingParams(1.0, logit_bias=((3, 1.0),))]
TREE = TokenTree((1, 2, 3), (-1, 0, -1))


class Raising:
    """Makes a function raise for one sequence, once it is ``armed``, and counts how often it did."""

    def __init__(self, error: Exception, is_guilty: Callable[..., bool]) -> None:
        self.error, self.is_guilty, self.armed, self.count = error, is_guilty, False, 0

    def plant(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.armed and self.is_guilty(*args):
                self.count += 1
                raise self.error
            return inner(*args, **kwargs)

        patch.setattr(owner, name, replaced)


class Runner(TableRunner):
    def forward(self, segments: Any) -> Any:
        self.begin([each.token_ids[0] if not each.num_context else self._first(each) for each in segments])
        return super().forward(segments)

    def _first(self, segment: Any) -> int:
        return self._token_of_slot[self._slot(segment, 0)]

    def begin(self, first_tokens: Any) -> None:
        """A pass over texts that begin with these tokens."""


def of_guilty(transforms: Transforms, *_: Any) -> bool:
    return transforms.params.top_k == SEED


PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "counting": (Transforms, "take_in", of_guilty),
    "edits": (Transforms, "collect", of_guilty),
    "masks": (Transforms, "mask", of_guilty),
    "draws": (SamplingState, "draw", lambda state, _: state.spec.seed == SEED),
    "logprobs": (reports, "logprobs_of", lambda logits, tokens, num_top: TOP in num_top),
    "forward": (Runner, "begin", lambda _, first_tokens: VOCAB - 1 in first_tokens),
}


def spec_of(seed: int, ids: tuple[int, ...], sampling: SamplingParams, method: Method = Method.COUPLED) -> SequenceSpec:
    return SequenceSpec(ids, len(ids), sampling, seed, method)


def innocent() -> dict[Key, TargetOpen]:
    methods = (Method.COUPLED, Method.COUPLED, Method.TOKEN)
    return {
        Key(1, i): TargetOpen(spec_of(i, (1 + i, 2, 3), sampling, method), num_logprobs=1, num_prompt_logprobs=2)
        for i, (sampling, method) in enumerate(zip(PARAMS, methods, strict=True))
    }


def texts(opens: dict[Key, TargetOpen], verifier: LmVerifier, own: int = 0) -> tuple[dict[Key, list[Any]], list[Any]]:
    """What each sequence gets in six rounds, and the errors."""
    engine, found, errors = TargetEngine(verifier), {key: [] for key in opens}, []
    for key, open_ in opens.items():
        engine.open(key, open_)
    bases = dict.fromkeys(opens, 3)
    for number in range(1, 8):
        while not engine.idle:
            for key, result in engine.step():
                if isinstance(result, SpecdecError):
                    errors.append((key, result))
                    del bases[key]
                else:
                    assert isinstance(result, Verdict)
                    found[key].append((result.base, result.accepted, result.next_token, result.logprobs))
                    bases[key] = result.base + len(result.accepted) + 1
        for key, base in bases.items():
            tree = TREE if opens[key].spec.keyed_by_token and number % 2 else EMPTY_TREE
            engine.submit(key, Round(number, base, EMPTY_TREE if own else tree, self_draft_nodes=own))
    for key in opens:
        engine.close(key)
    assert verifier.cache_use()[0] == 0
    return found, errors


@pytest.mark.parametrize("error", [RuntimeError("planted"), InvalidArgument([("x", "planted")])], ids=["any", "named"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first_pass", [0, 2])
def test_what_raises_for_one_sequence_ends_that_one(
    place: str, first_pass: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, errors = texts(innocent(), LmVerifier(Runner(vocab_size=VOCAB)))
    assert not errors
    owner, name, is_guilty = PLACES[place]
    raising = Raising(error, is_guilty)
    with monkeypatch.context() as patch:
        raising.plant(patch, owner, name)
        params = SamplingParams(0.9, top_k=SEED, frequency_penalty=0.1)
        spec = spec_of(SEED, (VOCAB - 1, 2, 3), params)
        opens = {GUILTY: TargetOpen(spec, num_logprobs=TOP), **innocent()}
        verifier = LmVerifier(Runner(vocab_size=VOCAB))
        verify, num_passes = verifier.verify, itertools.count()

        def armed(jobs: Any) -> Any:
            raising.armed = next(num_passes) >= first_pass
            return verify(jobs)

        patch.setattr(verifier, "verify", armed)
        found, errors = texts(opens, verifier)
    del found[GUILTY]
    assert found == alone
    assert [key for key, _ in errors] == [GUILTY]
    assert type(errors[0][1]) is (InvalidArgument if isinstance(error, InvalidArgument) else PassFailed)
    assert 1 <= raising.count <= 2, "and it is not asked again"


@pytest.mark.parametrize("verb", ["candidates", "learn"])
def test_a_text_for_which_its_own_drafter_raises_goes_on_without_it(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def verifier() -> LmVerifier:
        return LmVerifier(TableRunner(vocab_size=VOCAB), SelfDraftTrees(Recycling(VOCAB)))

    opens = {
        Key(1, i): TargetOpen(
            SequenceSpec((1 + i, 2, 3), 3, SamplingParams(0.5), i, cache_salt=bytes([i])), max_self_draft_nodes=8
        )
        for i in range(3)
    }
    plain, _ = texts(opens, verifier())
    drafted, _ = texts(opens, verifier(), own=8)
    guilty = Key(1, 1)

    def is_guilty(head: Recycling, asked: Any, *_: Any) -> bool:
        tables = [table for salt, table in head._tables.items() if salt[0] == guilty.sequence]
        states = [asked] if verb == "learn" else [draft.state for draft, _ in asked]
        return any(state is table for state in states for table in tables)

    raising = Raising(RuntimeError("planted"), is_guilty)
    raising.plant(monkeypatch, Recycling, verb)
    raising.armed = True
    found, errors = texts(opens, verifier(), own=8)
    assert not errors
    assert raising.count in (1, 2)
    assert [token for *_, token, _ in found[guilty]] == [token for *_, token, _ in plain[guilty]][: len(found[guilty])]
    assert {key: each for key, each in found.items() if key != guilty} == {
        key: each for key, each in drafted.items() if key != guilty
    }
