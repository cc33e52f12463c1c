"""Stands in for specdec.vllm.engine.VllmEngine: samplers run here, on the logits of a table model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specdec.core.rounds import Logprobs
from specdec.sampling.logprobs import logprobs_of
from specdec.vllm.passes import (
    Outcome,
    Place,
    PromptLogprobsRequest,
    Proposer,
    WorkerJob,
    WorkerSampler,
    num_kept,
    sampled_by,
)
from tests.models.table_runner import TableRunner


class FakeVllm:
    """Texts as lists. A prompt takes a pass for each ``prompt_rows`` of its ids. ``proposal``: what drafts."""

    max_chain, block_size, grammars, drafting_s = 4, 16, None, 0.0

    def __init__(
        self, table: TableRunner, sampler: WorkerSampler, prompt_rows: int = 512, proposal: TableRunner | None = None
    ) -> None:
        self.proposer = Proposer("eagle3", {}) if proposal is not None else None
        self.num_drafts: list[int | None] = []  # that the passes asked for
        self._proposal = proposal
        self.texts: dict[str, list[int]] = {}
        self.adapters: dict[str, str] = {}
        self.short_of_memory = self.computes_nan = False
        self.longest = self.max_chain  # of a chain; vLLM cuts some, such as at the end of the context
        self.num_passes = 0
        self._table, self._sampler, self._prompt_rows = table, sampler, prompt_rows
        self._payloads: dict[str, Any] = {}
        self._lacking: dict[str, int] = {}  # rows of prompts
        self._num_prompt: dict[str, int] = {}
        self._prompt_logprobs: dict[str, Logprobs] = {}  # that no outcome has had yet

    def add(
        self,
        ids: Sequence[int],
        salt: bytes,
        payload: Any,
        *,
        prompt_logprobs: PromptLogprobsRequest | None = None,
        adapter: str = "",
    ) -> str:
        key = str(len(self._payloads))
        self.adapters[key] = adapter
        if prompt_logprobs is not None:
            prompt = ids[: prompt_logprobs.num_tokens]
            logits = torch.stack([self._table.logits_after(prompt[:end]) for end in range(1, len(prompt))])
            [self._prompt_logprobs[key]] = logprobs_of([logits], [prompt[1:]], [prompt_logprobs.num_top], 1 << 20)
        self.texts[key], self._payloads[key] = list(ids), payload
        self._lacking[key] = self._num_prompt[key] = len(ids)
        return key

    def remove(self, key: str) -> None:
        self.texts.pop(key, None)
        self._sampler.forget(key)

    def follow(self, key: str, num_known: int, tail: Sequence[int], num_committed: int) -> list[int] | None:
        if key not in self.texts:
            return None
        num_prompt = self._num_prompt[key]
        kept = num_known + num_kept(self.texts[key][num_known:], tail, num_prompt - num_known)
        del self.texts[key][kept:]
        return list(tail[kept - num_known :])

    def run(
        self, chains: Mapping[str, Sequence[int]], extras: Mapping[str, Any], num_drafts: int | None = None
    ) -> tuple[dict[str, Outcome], int]:
        self.num_passes += 1
        self.num_drafts.append(num_drafts)
        if self.short_of_memory:
            return {key: Outcome(no_memory=True) for key in chains}, 0
        outcomes, jobs = {}, []
        for key, chain in chains.items():
            fresh = self._lacking[key] > 0
            self._lacking[key] = max(0, self._lacking[key] - self._prompt_rows)
            if self._lacking[key]:
                outcomes[key] = Outcome()
            else:
                jobs.append(self._job(key, () if fresh else chain[: self.longest], extras.get(key)))
        for job, sampled in zip(jobs, sampled_by(self._sampler, jobs), strict=True):
            self.texts[job.key] += sampled.tokens
            draft = tuple(self._draft(job, sampled.tokens, num_drafts or 0))
            if self._full(job.key):
                self.remove(job.key)
            prompt_logprobs = self._prompt_logprobs.pop(job.key, None)
            outcomes[job.key] = Outcome(
                tuple(sampled.tokens), sampled.extra, prompt_logprobs=prompt_logprobs, draft=draft
            )
        return outcomes, sum(1 + len(job.chain) for job in jobs)

    def _draft(self, job: WorkerJob, tokens: Sequence[int], num_tokens: int) -> Iterator[Any]:
        """By the proposer its ids, else by the model itself what its sampler says."""
        text = self.texts[job.key]
        ids, chain = text[: job.num_ids], list(tokens)
        for _ in range(num_tokens):
            if self._proposal is not None:
                place = Place(job.key, len(ids) + len(chain))
                logits = self._proposal.logits_after([*ids, *chain])[None]
                chain += self._sampler.draft(logits, [place]).tolist()  # type: ignore[attr-defined]
                yield chain[-1]
            elif chain:
                logits = self._table.logits_after([*ids, *chain])[None]
                further = replace(job, ids=lambda start: ids[start:], chain=chain, logits=logits)
                [sampled] = sampled_by(self._sampler, [further])
                chain = list(sampled.tokens)
                if chain:
                    yield sampled.extra

    def _full(self, key: str) -> bool:
        return len(self.texts[key]) >= self._table.info.context_length

    def _job(self, key: str, chain: Sequence[int], extra: Any) -> WorkerJob:
        text = self.texts[key]
        assert not self._full(key), "vLLM refuses it"
        logits = torch.stack([self._table.logits_after([*text, *chain[:end]]) for end in range(1 + len(chain))])
        if self.computes_nan:
            logits = logits * torch.nan
        sound = bool(logits.isfinite().all())
        return WorkerJob(key, self._payloads[key], extra, len(text), lambda start: text[start:], chain, logits, sound)

    def cache_use(self) -> tuple[int, int]:
        return sum(map(len, self.texts.values())), 4096
