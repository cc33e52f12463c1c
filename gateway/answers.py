"""The answers to completions and chat: as a whole, and chunk by chunk.

Knows OpenAI's shapes; does not know HTTP and where responses come from. A choice is a sample of a prompt: the samples
of prompt i have the indices i * n, i * n + 1, ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import logprobs
from gateway.bodies import ChatBody, CompletionBody
from gateway.calls import Call
from gateway.tools import Parser, Part, Reasoning, Text
from gateway.usage import Usage
from specdec.v1 import generation_pb2

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}
_ORIGINS = {
    generation_pb2.TOKEN_ORIGIN_DRAFT: "draft",
    generation_pb2.TOKEN_ORIGIN_LOOKUP: "lookup",
    generation_pb2.TOKEN_ORIGIN_CORRECTION: "correction",
    generation_pb2.TOKEN_ORIGIN_BONUS: "bonus",
}
_COUNTS = ("round", "base", "num_draft_tokens", "num_accepted_tokens", "rows", "sequences")
_TIMES = ("draft_wait_us", "path_us", "queue_us", "pass_us", "sample_us")


@dataclass(slots=True)
class _Sample:
    """What one choice has so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    num_rounds_sent: int = 0
    has_prompt: bool = False  # its ids were sent
    parser: Parser = field(default_factory=Parser)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    num_characters: int = 0
    num_echoed: int = 0  # of these, the prompt's
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """The answer to one request."""

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        num_prompts: int,
        request_id: str,
        model: str,
        parser: Callable[[], Parser] = Parser,
    ) -> None:
        """``parser``: of one answer's text, in chat."""
        self.body = body
        self.is_chat = isinstance(body, ChatBody)
        self.num_samples = body.n or 1
        self._model = model
        self._id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())
        self._fingerprint = ""
        # A completion of no tokens is its prompt alone.
        self._prompt_only = isinstance(body, CompletionBody) and body.max_tokens == 0
        self.usage = Usage(num_prompts, body.prediction is not None, not self._prompt_only)
        self._prompts: list[list[generation_pb2.Prompt]] = [[] for _ in range(num_prompts)]
        self._samples = [_Sample(parser=parser()) for _ in range(num_prompts * self.num_samples)]
        self._num_top, self._as_ids = body.num_top_logprobs, bool(body.return_tokens_as_token_ids)
        self._echoes = isinstance(body, CompletionBody) and bool(body.echo)

    # --- as a whole --------------------------------------------------------------------------------------------

    def collect(self, prompt: int, response: generation_pb2.GenerateResponse) -> None:
        """Add a response to one of the prompts."""
        for _ in self.chunks(prompt, response):
            pass

    def whole(self) -> dict[str, Any]:
        """The answer, once all responses are collected."""
        choices = [self._choice(index, sample) for index, sample in enumerate(self._samples)]
        answer = self._envelope("chat.completion" if self.is_chat else "text_completion", choices)
        answer["usage"] = self.usage.tokens
        if (speculation := self.usage.speculation) is not None:
            answer["metrics"] = speculation
        return answer | (self._of_prompt(0) if self.is_chat else {})

    def _choice(self, index: int, sample: _Sample) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        choice |= {"message": _message(sample)} if self.is_chat else {"text": "".join(sample.text)}
        choice["logprobs"] = logprobs.merged(sample.logprobs, self.is_chat) if self._num_top is not None else None
        if not self.is_chat:
            choice |= self._of_prompt(index // self.num_samples)
        choice |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if self.body.return_origins:
            choice["specdec"] = {"origins": sample.origins, "rounds": sample.rounds}
        return choice

    def _of_prompt(self, prompt: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = logprobs.of_prompt(self._prompts[prompt], self.body.prompt_logprobs)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_ids(prompt)
        return fields

    def _prompt_ids(self, prompt: int) -> list[int]:
        return [token_id for part in self._prompts[prompt] for token_id in part.token_ids]

    # --- chunk by chunk ----------------------------------------------------------------------------------------

    def begins(self) -> Iterator[dict[str, Any]]:
        """The first chunks of a stream: in chat each choice has its role first."""
        if self.is_chat:
            for index in range(len(self._samples)):
                delta = {"role": "assistant", "content": ""}
                yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunks(self, prompt: int, response: generation_pb2.GenerateResponse) -> Iterator[dict[str, Any]]:
        """The chunks that a response to one of the prompts gives."""
        if response.HasField("admission"):
            self._fingerprint = response.admission.model_digest[:12]
            self.usage.admitted(prompt, response.admission.num_prompt_tokens)
        elif response.HasField("prompt"):
            yield from self._echo(prompt, response.prompt)
        elif response.HasField("round"):
            self._samples[prompt * self.num_samples + response.round.index].rounds.append(_round(response.round))
        elif response.HasField("chunk"):
            self.usage.add(prompt, response.chunk)
            chunk = self._chunk(choice := self._delta(prompt, response.chunk))
            sample = self._samples[choice["index"]]
            if self.body.return_token_ids and not sample.has_prompt:
                sample.has_prompt = True
                (chunk if self.is_chat else choice)["prompt_token_ids"] = self._prompt_ids(prompt)
            yield chunk

    def ends(self) -> Iterator[dict[str, Any]]:
        """The last chunk of a stream, with the usage, if it is requested."""
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk(None)

    def _echo(self, prompt: int, part: generation_pb2.Prompt) -> Iterator[dict[str, Any]]:
        if self.body.prompt_logprobs is not None or self.body.return_token_ids:
            self._prompts[prompt].append(part)
        if not self._echoes:
            return
        for index in range(prompt * self.num_samples, (prompt + 1) * self.num_samples):
            logs = self._append(index, part, part.text)
            self._samples[index].num_echoed += len(part.text)
            yield self._chunk({"index": index, "text": part.text, "logprobs": logs, "finish_reason": None})

    def _delta(self, prompt: int, chunk: generation_pb2.Chunk) -> dict[str, Any]:
        index = prompt * self.num_samples + chunk.index
        sample = self._samples[index]
        if self._prompt_only:
            chunk = generation_pb2.Chunk(index=chunk.index, finish=chunk.finish)
            chunk.finish.reason = generation_pb2.FINISH_REASON_LENGTH
            chunk.finish.ClearField("matched")
        text, delta = chunk.text, dict[str, Any]()
        if self.is_chat:
            parts = sample.parser.feed(chunk.text) + (sample.parser.end() if chunk.HasField("finish") else [])
            text, delta = _delta_of(parts, sample, self.body.parallel_tool_calls is not False)
        logs = self._append(index, chunk, text)
        sample.token_ids += chunk.token_ids
        origins = [_ORIGINS[origin] for origin in chunk.origins]
        sample.origins += origins
        if chunk.HasField("finish"):
            matched = chunk.finish.WhichOneof("matched")
            sample.finish_reason = _REASONS[chunk.finish.reason]
            if sample.calls and sample.finish_reason == "stop" and not sample.parser.is_named:
                sample.finish_reason = "tool_calls"
            sample.stop_reason = getattr(chunk.finish, matched) if matched else None
            if matched == "stop_token_id" and sample.stop_reason not in (self.body.stop_token_ids or ()):
                sample.stop_reason = None  # the model's end token
        choice: dict[str, Any] = {"index": index, "logprobs": logs, "finish_reason": sample.finish_reason}
        choice |= {"delta": delta} if self.is_chat else {"text": text}
        if sample.finish_reason:
            choice["stop_reason"] = sample.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if self.body.return_origins:
            rounds = sample.rounds[sample.num_rounds_sent :]
            choice["specdec"] = {"origins": origins, "rounds": rounds, "text_ends": list(chunk.text_ends)}
            sample.num_rounds_sent = len(sample.rounds)
        return choice

    def _append(self, index: int, piece: logprobs.Piece, text: str) -> dict[str, Any] | None:
        """Append ``text`` and logprobs to a choice; the logprobs of the piece alone, if they are requested."""
        sample, logs = self._samples[index], None
        if self._num_top is not None:
            if self.is_chat:
                logs = logprobs.of_chat(piece, self._num_top, as_ids=self._as_ids)
            else:
                base = 0 if isinstance(piece, generation_pb2.Prompt) else sample.num_echoed
                logs = logprobs.of_completion(
                    piece, self._num_top, as_ids=self._as_ids, start=sample.num_characters, base=base
                )
            sample.logprobs.append(logs)
        sample.text.append(text)
        sample.num_characters += len(text)
        return logs

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        """A chunk with one choice; None: the one with the usage."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk = self._envelope(kind, [choice] if choice else [])
        options = self.body.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            chunk["usage"] = self.usage.tokens if choice is None or options.continuous_usage_stats else None
            if choice is None and (speculation := self.usage.speculation) is not None:
                chunk["metrics"] = speculation
        return chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }


def _message(sample: _Sample) -> dict[str, Any]:
    text = "".join(sample.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if sample.calls:
        calls = [{name: value for name, value in call.items() if name != "index"} for call in sample.calls]
        message |= {"content": text or None, "tool_calls": calls}
    if sample.reasoning:
        message["reasoning"] = "".join(sample.reasoning)
    return message


def _delta_of(parts: Sequence[Part], sample: _Sample, parallel: bool) -> tuple[str, dict[str, Any]]:
    """The text of the parts, and the delta with everything. Calls are added to ``sample``; unless ``parallel`` the
    first one alone."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [
        {
            "index": len(sample.calls) + number,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(part for part in parts if isinstance(part, Call))
        if parallel or not (number or sample.calls)
    ]
    sample.calls += calls
    sample.reasoning += [reasoning] if reasoning else []
    delta: dict[str, Any] = {"content": text} if text or not (calls or reasoning) else {}
    return text, delta | ({"tool_calls": calls} if calls else {}) | ({"reasoning": reasoning} if reasoning else {})


def _round(report: generation_pb2.RoundReport) -> dict[str, Any]:
    fields = {name: getattr(report, name) for name in (*_COUNTS, *_TIMES)}
    return fields | {"source": _ORIGINS.get(report.source)}
