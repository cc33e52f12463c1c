"""A language model with another vocabulary than the target's, as the drafter: it proposes chains.

Knows when texts and proposals are translated (translation.py: how). Its draft takes in the latest tokens of a text as
nodes of a tree, which may be dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter, LmState
from draft_service.drafters.other_vocabulary.translation import LOOK_BEHIND, ByteVocabulary, DraftText, Translation
from specdec.core.errors import SpecdecError
from specdec.core.rounds import AHEAD, SIBLINGS, ModelInfo
from specdec.core.sequence import Draw, SamplingParams, SequenceSpec
from specdec.core.tree import Candidate, TokenTree
from specdec.runner.checkpoint import vocabulary_of
from specdec.runner.files import TOKENIZER, directory_of
from specdec.runner.model_runner import ModelRunner
from specdec.runner.vocabulary import read_tokenizer
from specdec.sampling.distributions import greedy
from specdec.sampling.state import SamplingState

MIN_SHARE = 0.5
"""Of the draft's vocabulary that the target must have as well."""

ONE_BY_ONE_SHARE = 0.6
"""From this share on what is drawn at a temperature is translated token by token. Greedy texts are better translated as
texts (bench/LOG.md, 2026-11-28)."""

_TOKENS_PER_PASS = 4096
"""Tokens of a text that are translated between two passes, some milliseconds."""


@dataclass(slots=True)
class _State:
    inner: DraftSequence[LmState]  # of the draft: settled ids, and below them the latest ones and the drafted ones
    text: DraftText
    one_by_one: bool
    end: tuple[int, tuple[int, ...]] = (0, ())  # base and path of the target's tokens below which it drafts
    num_latest: int = 0  # nodes of the tree that are text
    is_cut: bool = False  # the text ends in part of a character, which the draft cannot take in

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.inner.tree.token_ids[self.num_latest :]


_Sequence = DraftSequence[_State]


class OtherVocabularyDrafter:
    """See draft_service.drafter.Drafter.

    It drafts its most likely text, which is encoded as the target does (SLEM of Timor et al., 2502.05202). Coupled
    sequences of a large shared vocabulary are drafted one by one: shared tokens only, with the noise of the target's
    ids (TLI).
    """

    def __init__(self, runner: ModelRunner, translation: Translation, target: ModelInfo) -> None:
        """``target``: the target's vocabulary. Raises ValueError, with a message for the operator, if
        too little of the draft's is shared."""
        if translation.share < MIN_SHARE:
            raise ValueError(
                f"the target has {translation.share:.0%} of the tokens of {runner.info.name}, and {MIN_SHARE:.0%} "
                "are needed: take a draft with a similar vocabulary"
            )
        self._translation = translation
        self._inner = LanguageModelDrafter(runner, ranking=SharedTokens(runner, translation))
        self.info = dataclasses.replace(
            self._inner.info,
            vocab_size=target.vocab_size,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
            tokens=target.tokens,
            eos_token_ids=target.eos_token_ids,
            capabilities=tuple(name for name in self._inner.info.capabilities if name not in (AHEAD, SIBLINGS)),
        )

    @staticmethod
    def load(runner: ModelRunner, model: str, *, revision: str, target: Path) -> OtherVocabularyDrafter:
        """Of a loaded ``model``, and the directory of the target or of its tokenizer. Raises ValueError as above."""
        try:
            info = vocabulary_of(target)
            vocabulary = ByteVocabulary(read_tokenizer(target / TOKENIZER), info.vocab_size, info.eos_token_ids)
        except (ValueError, OSError) as error:
            raise ValueError(f"--target-tokenizer: {error}") from error
        file = directory_of(model, revision) / TOKENIZER
        if not file.is_file():
            raise ValueError(f"{model}: it has no {TOKENIZER}, which --target-tokenizer needs")
        draft = ByteVocabulary(read_tokenizer(file), runner.info.vocab_size, runner.info.eos_token_ids)
        return OtherVocabularyDrafter(runner, Translation(draft, vocabulary), info)

    def open(self, spec: SequenceSpec) -> _State:
        one_by_one = spec.keyed_by_token and not spec.sampling.greedy and self._translation.share >= ONE_BY_ONE_SHARE
        # All other parameters are about the target's ids, and a proposal need not follow them.
        sampling, given = SamplingParams(temperature=0.0), spec.sampling
        if one_by_one:
            sampling = SamplingParams(given.temperature, top_k=given.top_k, top_p=given.top_p, min_p=given.min_p)
        inner_spec = SequenceSpec((), 0, sampling, seed=spec.seed, cache_salt=spec.cache_salt)
        state, text = self._inner.open(inner_spec), DraftText(self._translation)
        if one_by_one:
            state.sampling = _TargetDraws(inner_spec)
        return _State(DraftSequence(inner_spec, text.ids, state=state), text, one_by_one)

    def close(self, state: _State) -> None:
        self._inner.close(state.inner.state)

    def request_yield(self, requested: bool) -> None:
        self._inner.request_yield(requested)

    def cache_use(self) -> tuple[int, int]:
        return self._inner.cache_use()

    def learn(self, sequences: Sequence[_Sequence]) -> list[SpecdecError | bool]:
        outcomes: list[SpecdecError | bool] = [self._follow(sequence) for sequence in sequences]
        ready = [index for index, sequence in enumerate(sequences) if outcomes[index] and sequence.state.text.ids]
        if ready:
            learnt = self._inner.learn([sequences[index].state.inner for index in ready])
            for index, outcome in zip(ready, learnt, strict=True):
                outcomes[index] = outcome
        return outcomes

    def grow(self, sequences: Sequence[_Sequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        grown: list[Sequence[Candidate] | SpecdecError | None] = [None] * len(sequences)
        growing: list[int] = []
        for index, sequence in enumerate(sequences):
            if self._follow(sequence):
                sequence.state.inner.num_wanted = self._num_lacking(sequence)
                if sequence.state.inner.num_wanted > 0:
                    growing.append(index)
                else:
                    grown[index] = self._proposal(sequence)
        drafted = self._inner.grow([sequences[index].state.inner for index in growing]) if growing else []
        for index, candidates in zip(growing, drafted, strict=True):
            if isinstance(candidates, SpecdecError):
                grown[index] = candidates
            elif candidates is not None:
                inner = sequences[index].state.inner
                inner.tree = inner.tree.extended(candidates)
                if not candidates or self._num_lacking(sequences[index]) <= 0:
                    grown[index] = self._proposal(sequences[index])
        return grown

    def _follow(self, sequence: _Sequence) -> bool:
        """Bring the draft's text and tree to the end of the tree. False: that takes another pass."""
        state = sequence.state
        path = sequence.tree.token_ids
        if state.end == (sequence.base, path):
            return True
        state.text.take_in(sequence.ids, _TOKENS_PER_PASS)
        if state.text.num_taken < sequence.base:
            return False
        latest = state.text.latest(path)
        state.is_cut = latest is None
        state.inner.tree = TokenTree.chain(latest or ())
        state.num_latest, state.end = len(state.inner.tree), (sequence.base, path)
        if state.one_by_one:
            shift = sequence.base + len(path) - state.inner.base - state.num_latest
            inner = state.inner.state
            if isinstance(inner.sampling, _TargetDraws) and inner.sampling.shift != shift:
                inner.sampling.shift = shift
                inner.cache.forget_candidates()  # which were drawn for other positions
        return True

    def _num_lacking(self, sequence: _Sequence) -> int:
        """How many tokens are still to be drafted. One more than wanted, if the last one may be half a word."""
        state = sequence.state
        num_fed = state.inner.base + len(state.inner.tree)
        if state.is_cut or not state.text.ids:
            return 0
        num_fit = self._inner.info.context_length - num_fed + 1
        return min(sequence.num_wanted + (not state.one_by_one) - len(state.drafted), num_fit)

    def _proposal(self, sequence: _Sequence) -> list[Candidate]:
        drafted = sequence.state.drafted
        if sequence.state.one_by_one:
            tokens = self._translation.by_token(drafted)
        else:
            tokens = self._translation.by_text([*sequence.ids[-LOOK_BEHIND:], *sequence.tree.token_ids], drafted)
        last = len(sequence.tree) - 1
        return [Candidate(parent, token) for parent, token in enumerate(tokens[: sequence.num_wanted], last)]


class _TargetDraws(SamplingState):
    """The state of a sequence in which the draft's positions and the target's are ``shift`` apart."""

    shift = 0

    @property
    def draws_by_logits(self) -> bool:
        return False  # the draft's ids have no noise

    def draw(self, position: int) -> Draw:
        # A text of more tokens than the target's has rows before position 0. Nothing is proposed there.
        return super().draw(max(0, position + self.shift))


class SharedTokens:
    """Draws the draft's tokens as the target's: those that are not shared are never drawn. Greedy rows keep all."""

    def __init__(self, runner: ModelRunner, translation: Translation) -> None:
        target_of = torch.tensor(translation.target_of, device=runner.backend.device)
        self._backend, self._vocab_size = runner.backend, translation.target.vocab_size
        self._shared = (target_of >= 0).nonzero()[:, 0]  # [shared] the draft's ids
        self._targets = target_of[self._shared]  # [shared]
        self._draft_of = torch.zeros(self._vocab_size, dtype=torch.int64, device=target_of.device)
        self._draft_of[self._targets] = self._shared

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:  # [rows, draft vocab] -> [rows] int64
        drawn = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
        if not drawn:
            return self._backend.draw(logits, draws)
        tokens = greedy(logits)
        rows = self._target_logits(logits[drawn])
        tokens[drawn] = self._draft_of[self._backend.draw(rows, [draws[row] for row in drawn]).to(tokens.device)]
        return tokens

    def leaders(self, logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:
        return self._backend.leaders(logits, draws, count)  # of sequences with siblings, of which there are none

    def _target_logits(self, logits: Tensor) -> Tensor:  # [rows, draft vocab] -> [rows, target vocab]
        rows = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        rows[:, self._targets] = logits[:, self._shared]
        return rows
