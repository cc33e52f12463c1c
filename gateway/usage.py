"""What an answer took: tokens, and what speculation did. Knows sums; does not know texts."""

from __future__ import annotations

import itertools
from typing import Any

from specdec.v1 import generation_pb2


class Usage:
    """The sums over the samples of all prompts of a request."""

    def __init__(self, num_prompts: int, predicts: bool, counts_output: bool = True) -> None:
        """``predicts``: the request has a prediction. ``counts_output``: False: of a prompt alone."""
        self._prompt_tokens = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._predicts = predicts
        self._counts_output = counts_output
        self._reasoning_tokens: dict[int, int] = {}
        self._completion_tokens: dict[tuple[int, int], int] = {}
        self._lookup_tokens = self._accepted_lookup_tokens = 0
        self._num_drafts = self._draft_tokens = self._accepted_tokens = 0
        self._accepted_per_pos: list[int] = []

    def admitted(self, prompt: int, num_prompt_tokens: int) -> None:
        self._prompt_tokens[prompt] = num_prompt_tokens

    def reasons(self, index: int, num_tokens: int) -> None:
        """Of these tokens of a choice, its reasoning consists."""
        self._reasoning_tokens[index] = num_tokens

    def add(self, prompt: int, chunk: generation_pb2.Chunk) -> None:
        key = prompt, chunk.index
        if self._counts_output:
            self._completion_tokens[key] = self._completion_tokens.get(key, 0) + len(chunk.token_ids)
        if not chunk.HasField("finish"):
            return
        speculation = chunk.finish.speculation
        if self._counts_output:  # with what ended it, which is no part of the text
            self._completion_tokens[key] = chunk.finish.usage.completion_tokens
        self._cached[prompt] = max(self._cached[prompt], chunk.finish.usage.cached_prompt_tokens)
        self._lookup_tokens += speculation.num_lookup_tokens
        self._accepted_lookup_tokens += speculation.num_accepted_lookup_tokens
        self._num_drafts += speculation.num_drafts
        self._draft_tokens += speculation.num_draft_tokens
        self._accepted_tokens += speculation.num_accepted_tokens
        pairs = itertools.zip_longest(self._accepted_per_pos, speculation.num_accepted_tokens_per_pos, fillvalue=0)
        self._accepted_per_pos = [before + count for before, count in pairs]

    @property
    def tokens(self) -> dict[str, Any]:
        """The field usage."""
        prompt, completion = sum(self._prompt_tokens), sum(self._completion_tokens.values())
        tokens: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        details: dict[str, int] = {}
        if self._predicts:
            details["accepted_prediction_tokens"] = self._accepted_lookup_tokens
            details["rejected_prediction_tokens"] = self._lookup_tokens - self._accepted_lookup_tokens
        if self._reasoning_tokens:
            details["reasoning_tokens"] = sum(self._reasoning_tokens.values())
        return tokens | ({"completion_tokens_details": details} if details else {})

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The field metrics, as vLLM writes it and AIPerf reads it. None: nothing was drafted."""
        if not self._num_drafts:
            return None
        reached = [self._num_drafts, *self._accepted_per_pos, 0]
        return {
            "speculative_decoding": {
                "num_spec_tokens": len(self._accepted_per_pos),
                "num_spec_steps": self._num_drafts,
                "num_draft_tokens": self._draft_tokens,
                "num_accepted_draft_tokens": self._accepted_tokens,
                "mean_acceptance_length": 1 + self._accepted_tokens / self._num_drafts,
                "draft_acceptance_rate": self._accepted_tokens / max(1, self._draft_tokens),
                # How many rounds had exactly 0, 1, ... accepted tokens.
                "acceptance_histogram": [at - further for at, further in itertools.pairwise(reached)],
            }
        }
