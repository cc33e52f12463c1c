"""RemoteDraft: a proposer that vLLM loads by its option ``--speculative-config``, and that asks our draft service.

vLLM gives rows of token ids without names of requests, so a request is known by its text: a row continues the text that
it begins with. vLLM verifies whatever is proposed; a missing, late or lost draft proposes nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import hf_hub_download
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from specdec.bridges.draft_stream import DraftStream, Inbox
from specdec.core.errors import ModelMismatch, SpecdecError
from specdec.core.rounds import AHEAD, Advance, Budget, ModelInfo
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.settings import checked_addresses, split_at_commas
from specdec.core.tree import EMPTY_TREE, MAX_TREE_NODES, TokenTree
from specdec.runner.files import TOKENIZER
from specdec.runner.vocabulary import Vocabulary, read_vocabulary
from specdec.security.tls import Tls
from specdec.transport.opening import draft_open
from specdec.transport.wire import write_advance
from specdec.v1 import draft_pb2

_FIRST_CONTACT_S = 10.0
_REFUSED_PAUSE_S = 5.0
"""A text that the draft refused, or ended, is not opened again before."""


class BridgeSettings(BaseSettings):
    """The environment, by the names that an orchestrator's settings have."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_", extra="ignore")

    draft: Annotated[list[str], NoDecode] = Field(min_length=1, description="host:port of a draft, or of several")
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    num_ahead_tokens: int = Field(60, ge=0, le=256, description="tokens drafted ahead while vLLM verifies")
    draft_wait_ms: float = Field(20.0, ge=0, description="how long a pass waits for drafts that are not there, at most")

    _split = field_validator("draft", mode="before")(split_at_commas)
    _checked = field_validator("draft")(checked_addresses)


@dataclass(slots=True, eq=False)
class _Text:
    """A request as the draft knows it."""

    ids: Any  # array [num_ids]
    sequence: int = 0  # on the stream; 0: not open
    opened_at: int = 0  # number of ids then
    advance: int = 0
    trie: TokenTree = EMPTY_TREE
    inbox: Inbox = field(default_factory=deque)
    late: bool = False  # an answer is owed, and no pass waits for it again
    retry_at: float = 0.0

    def begins(self, ids: Any) -> bool:
        size = len(self.ids)
        return size <= len(ids) and ids[size - 1] == self.ids[-1] and bool((ids[:size] == self.ids).all())

    def commit(self, ids: Any) -> tuple[int, ...]:
        """Returns the new ids."""
        new = tuple(ids[len(self.ids) :].tolist())
        self.ids, self.trie = ids.copy(), self.trie.descend(new)
        return new

    def answered(self) -> bool:
        return any(isinstance(entry, SpecdecError) or entry.advance == self.advance for entry in tuple(self.inbox))

    def chain(self, num_tokens: int) -> TokenTree:
        """The most likely continuation of those that have arrived."""
        while self.inbox:
            entry = self.inbox.popleft()
            if isinstance(entry, SpecdecError):
                self.sequence, self.trie, self.retry_at = 0, EMPTY_TREE, time.monotonic() + _REFUSED_PAUSE_S
            elif self.opened_at <= entry.base <= len(self.ids):
                self.late = self.late and entry.advance != self.advance
                left = entry.tree.under(entry.path).descend(self.ids[entry.base :].tolist())
                self.trie = self.trie.merge(left.prefix(MAX_TREE_NODES - len(self.trie)))
        return self.trie.part(self.trie.most_likely_chains()).prefix(num_tokens)


class RemoteDraft:
    """The class that ``--speculative-config`` names. Raises ValueError, with a message for the operator, if a setting
    is invalid or the draft has another vocabulary. A draft that cannot be reached is tried again in the background."""

    def __init__(self, vllm_config: Any) -> None:
        self._num_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._texts: dict[int, _Text] = {}  # by row of the last call
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._stream: DraftStream | None = None
        parallel = vllm_config.parallel_config
        if parallel.rank % parallel.tensor_parallel_size:
            return  # vLLM takes the proposals of the first rank alone
        try:
            self._settings = settings = BridgeSettings()
        except ValidationError as error:
            problems = (f"SPECDEC_{str(problem['loc'][0]).upper()}: {problem['msg']}" for problem in error.errors())
            raise ValueError("; ".join(problems)) from error
        tls = None
        if settings.tls_ca:  # the name to which alone a draft service opens streams
            tls = Tls(settings.tls_ca, settings.tls_cert, settings.tls_key, owner="orchestrator")
        self._stream = stream = DraftStream(settings.draft, tls, *_target(vllm_config.model_config))
        stream.wait(lambda: stream.draft is not None, _FIRST_CONTACT_S)
        if isinstance(stream.problem, ModelMismatch):
            self.close()
            raise ValueError(str(stream.problem))

    def load_model(self, *_: Any) -> None:
        """vLLM calls it. The draft's model is in its service."""

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Draft tokens of each row, none where there are none.

        ``sampled_token_ids``: what the pass before committed; empty for a row that is still in its prefill.
        ``num_tokens_no_spec``: [rows], ids of each text; ``token_ids_cpu``: [rows, length], the ids.
        """
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        stream = self._stream
        if stream is None or (draft := stream.draft) is None:
            return proposals
        epoch = stream.epoch  # another thread ends it
        before, self._texts = self._texts if self._epoch == epoch else {}, {}
        self._epoch = epoch
        frames: list[draft_pb2.DraftRequest] = []
        opened: dict[int, Inbox] = {}
        waited_for: list[tuple[int, _Text]] = []
        last = draft_pb2.DraftRequest()
        for row, sampled in enumerate(sampled_token_ids):
            ids = token_ids_cpu[row, : num_tokens_no_spec[row]]
            if not len(sampled) or len(ids) + self._num_tokens >= draft.context_length:
                continue
            self._texts[row] = text = _continued(before, row, ids)
            new = text.commit(ids)
            chain = text.chain(self._num_tokens)
            proposals[row] = list(chain.token_ids)
            budget = self._budget(draft, chain)
            if text.sequence:
                text.advance += 1
                advance = Advance(text.advance, len(ids), token_ids=new, in_flight=chain, budget=budget)
                last.advances.append(write_advance(text.sequence, advance))
            elif time.monotonic() >= text.retry_at:
                text.sequence, text.opened_at, text.advance, text.late = next(self._numbers), len(ids), 0, False
                opened[text.sequence] = text.inbox = deque()
                spec = SequenceSpec(text.ids.tolist(), len(ids), sampling=SamplingParams(temperature=0.0))
                frames += [draft_pb2.DraftRequest(opens=[part]) for part in draft_open(text.sequence, spec, budget)]
            if text.sequence and not (chain or text.late):
                waited_for.append((row, text))
        last.closes.extend(text.sequence for text in before.values() if text.sequence)
        stream.send(epoch, [*frames, last], opened)
        stream.wait(lambda: all(text.answered() for _, text in waited_for), self._settings.draft_wait_ms / 1e3)
        for row, text in waited_for:
            text.late = not text.answered()
            proposals[row] = list(text.chain(self._num_tokens).token_ids)
        return proposals

    def _budget(self, draft: ModelInfo, chain: TokenTree) -> Budget:
        """A chain if none is there; and more below it while vLLM verifies it."""
        num_ahead = self._settings.num_ahead_tokens if AHEAD in draft.capabilities else 0
        num_wanted = 0 if chain else self._num_tokens
        return Budget(num_wanted, max_depth=2 * self._num_tokens + 1, max_ahead=num_ahead)


def _continued(before: dict[int, _Text], row: int, ids: Any) -> _Text:
    """The text that ``ids`` continue, taken out of ``before``, or a new one. vLLM moves rows, so it may be any."""
    for at in (row, *before):
        if (text := before.get(at)) is not None and text.begins(ids):
            return before.pop(at)
    return _Text(ids[:0])


def _target(model_config: Any) -> tuple[ModelInfo, Vocabulary]:
    """What verifies: vLLM's own model. Its vocabulary is that of its tokenizer."""
    file = Path(model_config.tokenizer) / TOKENIZER
    try:
        if not file.is_file():
            file = Path(hf_hub_download(model_config.tokenizer, TOKENIZER, revision=model_config.tokenizer_revision))
        tokens = read_vocabulary(file).below(model_config.get_vocab_size())
    except (OSError, ValueError) as error:  # those of the hub's client are one or the other
        raise ValueError(f"the vocabulary of {model_config.tokenizer} is not known: {error}") from error
    info = ModelInfo(model_config.tokenizer, "", len(tokens), tokens.fingerprint, model_config.max_model_len)
    return info, tokens
