"""The proposer for vLLM, asked as vLLM's model runner asks it, with the real draft service around a table model."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from draft_service.server import create_server
from specdec.bridges import draft_stream
from specdec.bridges.vllm import RemoteDraft
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.settings import EngineSettings
from specdec.runner.vocabulary import Vocabulary
from specdec.security import dev_ca
from specdec.server.model_server import ModelServer
from testing.certificates import files
from testing.patience import eventually
from testing.table_model import Table, TableDrafter

TABLE = Table(acceptance=0.8)
GREEDY = SequenceSpec((1,), 1, SamplingParams(temperature=0.0))
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """The directory of a tokenizer with the table's vocabulary."""
    directory = tmp_path_factory.mktemp("tokenizer")
    words = {f"w{index}": index for index in range(TABLE.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """A busy machine is no late draft, and reconnects at once."""
    monkeypatch.setenv("SPECDEC_DRAFT_WAIT_MS", "30000")
    monkeypatch.setattr(draft_stream, "_RECONNECT_S", 0.02)
    monkeypatch.setattr(draft_stream, "_IDLE_S", 0.2)


@pytest.fixture
def proposer(tokenizer, monkeypatch) -> Iterator[Callable[..., RemoteDraft]]:
    """Makes proposers as vLLM does, for drafts at ``addresses``. They are closed at the end."""
    proposers: list[RemoteDraft] = []

    def make(*addresses: str, rank: int = 0, ahead: int = 60, **files: str) -> RemoteDraft:
        monkeypatch.setenv("SPECDEC_DRAFT", ",".join(addresses))
        monkeypatch.setenv("SPECDEC_NUM_AHEAD_TOKENS", str(ahead))
        for name, file in files.items():
            monkeypatch.setenv(f"SPECDEC_{name.upper()}", file)
        model = SimpleNamespace(
            tokenizer=str(tokenizer), tokenizer_revision=None, max_model_len=4096, get_vocab_size=lambda: 1024
        )
        proposers.append(
            RemoteDraft(
                SimpleNamespace(
                    speculative_config=SimpleNamespace(num_speculative_tokens=NUM_TOKENS),
                    parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
                    model_config=model,
                )
            )
        )
        return proposers[-1]

    yield make
    for proposer in proposers:
        proposer.close()


class Gated(TableDrafter):
    """Its passes wait for ``gate``."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.gate = threading.Event()

    def grow(self, sequences: Any) -> Any:
        self.gate.wait(30)
        return super().grow(sequences)


def drafter(directory: Path, kind: type[TableDrafter] = TableDrafter, vocab_size: int = 1024, **facts: Any) -> Any:
    table = kind(dataclasses.replace(TABLE, vocab_size=vocab_size))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    facts.setdefault("tokenizer_fingerprint", Vocabulary.of(tokenizer).below(vocab_size).fingerprint)
    table.info = dataclasses.replace(table.info, **facts)
    return table


@asynccontextmanager
async def served(drafter: TableDrafter, **settings: Any) -> AsyncIterator[ModelServer]:
    server = create_server(drafter, EngineSettings(**settings))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def at(server: ModelServer) -> str:
    return f"127.0.0.1:{server.port}"


class Batch:
    """Rows of texts as vLLM keeps them, with the table as the model."""

    def __init__(self, proposer: RemoteDraft, *prompts: Sequence[int]) -> None:
        self._proposer = proposer
        self.texts = [list(prompt) for prompt in prompts]
        self.proposals: list[list[int]] = [[] for _ in prompts]
        self.num_accepted = 0

    def step(self, prefilling: int = 0) -> None:
        """A pass and the proposals after it. The last ``prefilling`` rows are still in their prefill."""
        sampled: list[list[int]] = []
        for row, (text, proposal) in enumerate(zip(self.texts, self.proposals, strict=True)):
            new: list[int] = []
            if row < len(self.texts) - prefilling:
                new = [TABLE.next_token(GREEDY, text[-3:], len(text))]
                for token in proposal:
                    if token != new[-1]:
                        break
                    new.append(TABLE.next_token(GREEDY, [*text, *new][-3:], len(text) + len(new)))
            self.num_accepted += max(0, len(new) - 1)
            text += new
            sampled.append(new)
        rows = np.full((len(self.texts) + 3, 4096), 7, np.int32)
        for row, text in zip(rows, self.texts, strict=False):
            row[: len(text)] = text
        lengths = np.array([*map(len, self.texts), 0, 0, 0], np.int32)
        self.proposals = self._proposer.propose(sampled, lengths, rows, slot_mappings=None)
        assert all(len(proposal) <= NUM_TOKENS for proposal in self.proposals)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def end(self, row: int) -> None:
        """The last row takes its place, as in vLLM."""
        for rows in (self.texts, self.proposals):
            rows[row] = rows[-1]  # type: ignore[index, assignment]
            rows.pop()


PROMPTS = [[3, 1, 4, 1], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [9] * 900]


@pytest.mark.parametrize("ahead", [60, 0])
async def test_drafts_are_proposed_and_most_are_right(tokenizer, proposer, ahead: int) -> None:
    async with served(drafter(tokenizer)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server), ahead=ahead), *PROMPTS)
        await asyncio.to_thread(batch.steps, 30)
        expected = [
            TABLE.text(dataclasses.replace(GREEDY, token_ids=tuple(p), num_prompt_tokens=len(p)), 400) for p in PROMPTS
        ]
        for prompt, text, right in zip(PROMPTS, batch.texts, expected, strict=True):
            assert text[len(prompt) :] == right[: len(text) - len(prompt)]
        assert batch.num_accepted > 30 * len(PROMPTS)
        assert server.load.live_sequences == len(PROMPTS)


async def test_what_the_draft_grew_ahead_is_proposed_without_a_wait(tokenizer, proposer, monkeypatch) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT_WAIT_MS", "0")
    async with served(drafter(tokenizer)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), PROMPTS[0])

        async def proposed() -> None:
            while not batch.proposals[0]:
                await asyncio.to_thread(batch.step)

        await asyncio.wait_for(proposed(), 30)


async def test_rows_that_move_are_known_and_requests_that_ended_are_closed(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), *PROMPTS)
        await asyncio.to_thread(batch.step)
        opened = {row: text.sequence for row, text in batch._proposer._texts.items()}
        batch.end(0)
        await asyncio.to_thread(batch.step)
        kept = {row: text.sequence for row, text in batch._proposer._texts.items()}
        assert kept == {0: opened[3], 1: opened[1], 2: opened[2]}
        await eventually(lambda: server.load.live_sequences == 3)
        assert all(batch.proposals)
        await eventually(lambda: server.load.live_sequences == 0)  # the engine is idle
        await asyncio.to_thread(batch.step)
        assert all(batch.proposals), "opened again"


async def test_a_row_in_its_prefill_has_no_proposal_and_is_opened_after_it(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), *PROMPTS[:2])
        await asyncio.to_thread(batch.step, prefilling=1)
        assert batch.proposals[0]
        assert not batch.proposals[1]
        await asyncio.to_thread(batch.step)
        assert all(batch.proposals)


async def test_a_late_draft_proposes_nothing_and_is_not_waited_for_again(tokenizer, proposer, monkeypatch) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT_WAIT_MS", "1")
    slow = drafter(tokenizer, Gated)
    async with served(slow) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), PROMPTS[0])
        await asyncio.to_thread(batch.step)
        assert not batch.proposals[0]
        batch._proposer._settings.draft_wait_ms = 1e9
        await asyncio.wait_for(asyncio.to_thread(batch.steps, 3), 30)
        assert not batch.proposals[0]
        slow.gate.set()

        async def proposed() -> None:
            while not batch.proposals[0]:
                await asyncio.to_thread(batch.step)

        await asyncio.wait_for(proposed(), 30)


async def test_a_lost_draft_proposes_nothing_until_one_is_back(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), *PROMPTS)
        port = server.port
        await asyncio.to_thread(batch.steps, 5)
        assert all(batch.proposals)
    stream = batch._proposer._stream
    await eventually(lambda: stream.draft is None)
    await asyncio.to_thread(batch.steps, 5)
    assert not any(batch.proposals)
    async with served(drafter(tokenizer), port=port):
        await eventually(lambda: stream.draft is not None)
        await asyncio.to_thread(batch.step)
        assert all(batch.proposals)


async def test_it_starts_without_a_draft_and_uses_the_next_address(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer)) as server:
        other = await asyncio.to_thread(proposer, "127.0.0.1:1", at(server))
        await eventually(lambda: other._stream.draft is not None)
        batch = Batch(other, PROMPTS[0])
        await asyncio.to_thread(batch.step)
        assert batch.proposals[0]


async def test_a_text_that_the_draft_refuses_costs_the_others_nothing(tokenizer, proposer) -> None:
    """A draft with fewer tokens cannot read every text."""
    async with served(drafter(tokenizer, vocab_size=1000)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), [3, 1, 4], [1001, 1, 4])
        await asyncio.to_thread(batch.step)
        assert not batch.proposals[1]
        await eventually(lambda: server.load.live_sequences <= 1)


async def test_a_text_longer_than_the_drafts_context_has_no_draft(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer, context_length=64)) as server:
        batch = Batch(await asyncio.to_thread(proposer, at(server)), [5] * 100, [5] * 50)
        await asyncio.to_thread(batch.step)
        assert not batch.proposals[0]
        assert batch.proposals[1]
        await asyncio.to_thread(batch.steps, 20)
        assert not any(batch.proposals)


async def test_another_vocabulary_is_refused_at_the_start(tokenizer, proposer) -> None:
    async with served(drafter(tokenizer, tokenizer_fingerprint="another")) as server:
        with pytest.raises(
            ValueError, match=r"draft 127.0.0.1:\d+ has the vocabulary another of 1024 tokens, the target"
        ):
            await asyncio.to_thread(proposer, at(server))


@pytest.mark.parametrize(
    ("addresses", "settings", "words"),
    [
        ([], {}, "SPECDEC_DRAFT: .*at least 1 item"),
        (["nowhere"], {}, "SPECDEC_DRAFT: .*'nowhere' is not host:port"),
        (["127.0.0.1:1"], {"ahead": "x"}, "SPECDEC_NUM_AHEAD_TOKENS: .*integer"),
        (["127.0.0.1:1"], {"tls_ca": "/nowhere/ca.crt"}, "/nowhere/ca.crt: No such file"),
    ],
)
def test_a_bad_setting_is_named(proposer, addresses: list[str], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        proposer(*addresses, **settings)


async def test_it_calls_with_tls_as_an_orchestrator(tokenizer, proposer, tmp_path) -> None:
    dev_ca.make(tmp_path)
    async with served(drafter(tokenizer), **files(tmp_path, "draft")) as server:
        with pytest.raises(ValueError, match=r"issued for gateway.*, not for orchestrator"):
            await asyncio.to_thread(proposer, at(server), **files(tmp_path, "gateway"))
        batch = Batch(await asyncio.to_thread(proposer, at(server), **files(tmp_path, "orchestrator")), PROMPTS[0])
        await asyncio.to_thread(batch.step)
        assert batch.proposals[0]


def test_only_the_first_rank_asks(proposer) -> None:
    batch = Batch(proposer("127.0.0.1:1", rank=1), PROMPTS[0])
    batch.step()
    assert batch.proposals == [[]]
