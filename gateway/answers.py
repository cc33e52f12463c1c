"""The answers to completions and chat: as a whole, and chunk by chunk.

Knows OpenAI's shapes; does not know HTTP and where responses come from. A choice is a sample of a prompt: the samples
of prompt i have the indices i * n, i * n + 1, ...
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import logprobs
from gateway.bodies import ChatBody, CompletionBody
from gateway.call_finder import Text
from gateway.errors import HttpError
from gateway.tool_call import Call
from gateway.tools import Parser, Part, Reasoning
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

    parser: Parser
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    num_rounds_sent: int = 0
    has_prompt: bool = False  # its ids were sent
    has_role: bool = False
    calls: list[tuple[Call, list[str]]] = field(default_factory=list)  # with the pieces of their arguments
    num_calls: int = 0  # with those that are left out
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)  # of the tokens, as the model wrote them
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
        parser: Callable[[], Parser],
    ) -> None:
        """``parser``: of one answer's text, in chat."""
        self.body = body
        self.is_chat = isinstance(body, ChatBody)
        self.route = "chat" if self.is_chat else "completions"
        self.num_samples = body.n or 1
        self.request_id = request_id
        self.model = model
        self._id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())
        self._fingerprint = ""
        # A completion of no tokens is its prompt alone.
        self._prompt_only = isinstance(body, CompletionBody) and body.max_tokens == 0
        self.usage = Usage(num_prompts, body.prediction is not None, not self._prompt_only)
        self._prompts: list[list[generation_pb2.Prompt]] = [[] for _ in range(num_prompts)]
        self._samples = [_Sample(parser()) for _ in range(num_prompts * self.num_samples)]
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

    def chunks(self, prompt: int, response: generation_pb2.GenerateResponse) -> Iterator[dict[str, Any]]:
        """The chunks that a response to one of the prompts gives."""
        if response.HasField("admission"):
            self._fingerprint = response.admission.model_digest[:12]
            self.usage.admitted(prompt, response.admission.num_prompt_tokens)
            for sample in self._samples if response.admission.in_reasoning else ():
                sample.parser.reasoning.begin_within()
        elif response.HasField("prompt"):
            yield from self._echo(prompt, response.prompt)
        elif response.HasField("round"):
            self._samples[prompt * self.num_samples + response.round.index].rounds.append(_round(response.round))
        elif response.HasField("chunk"):
            self.usage.add(prompt, response.chunk)
            yield from self._sample_chunks(prompt, response.chunk)

    def ends(self) -> Iterator[dict[str, Any]]:
        """The last chunk of a stream, with the usage, if it is requested."""
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk(None)

    def failed(self, error: HttpError) -> Iterator[dict[str, Any]]:
        """The last chunk of a stream that breaks."""
        yield error.body

    def _echo(self, prompt: int, part: generation_pb2.Prompt) -> Iterator[dict[str, Any]]:
        if self.body.prompt_logprobs is not None or self.body.return_token_ids:
            self._prompts[prompt].append(part)
        if not self._echoes:
            return
        for index in range(prompt * self.num_samples, (prompt + 1) * self.num_samples):
            logs = self._append(index, part, part.text)
            self._samples[index].num_echoed += len(part.text)
            yield self._chunk({"index": index, "text": part.text, "logprobs": logs, "finish_reason": None})

    def _sample_chunks(self, prompt: int, chunk: generation_pb2.Chunk) -> Iterator[dict[str, Any]]:
        """Those of a piece of one sample. In chat there may be several, each with one call at most, as some clients
        read one alone; or none, if there is nothing to say yet."""
        index = prompt * self.num_samples + chunk.index
        sample = self._samples[index]
        if self._prompt_only:
            chunk = generation_pb2.Chunk(index=chunk.index, finish=chunk.finish)
            chunk.finish.reason = generation_pb2.FINISH_REASON_LENGTH
            chunk.finish.ClearField("matched")
        text, deltas = chunk.text, list[dict[str, Any]]()
        if self.is_chat:
            parts = sample.parser.feed(chunk.text) + (sample.parser.end() if chunk.HasField("finish") else [])
            sample.text_ends += chunk.text_ends
            if sample.parser.reasoning.splits:
                self.usage.reasons(index, bisect_right(sample.text_ends, sample.parser.reasoning.end))
            if isinstance(self.body, ChatBody) and self.body.include_reasoning is False:
                parts = [part for part in parts if not isinstance(part, Reasoning)]
            text, deltas = _deltas_of(parts, sample, self.body.parallel_tool_calls is not False)
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
        if sample.finish_reason:
            choice["stop_reason"] = sample.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if self.body.return_origins:
            rounds = sample.rounds[sample.num_rounds_sent :]
            choice["specdec"] = {"origins": origins, "rounds": rounds, "text_ends": list(chunk.text_ends)}
            sample.num_rounds_sent = len(sample.rounds)
        if not self.is_chat:
            choice["text"] = text
        elif deltas or sample.finish_reason or logs or self.body.return_token_ids or self.body.return_origins:
            # The role comes with the first token: clients take it for one.
            role: list[dict[str, Any]] = [] if sample.has_role else [{"role": "assistant", "content": ""}]
            sample.has_role = True
            said = role + (deltas or [{"content": ""}])
            choice["delta"] = said.pop()
            for delta in said:
                yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        else:
            return
        last = self._chunk(choice)
        if self.body.return_token_ids and not sample.has_prompt:
            sample.has_prompt = True
            (last if self.is_chat else choice)["prompt_token_ids"] = self._prompt_ids(prompt)
        yield last

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
            "model": self.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }


def _message(sample: _Sample) -> dict[str, Any]:
    text = "".join(sample.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if sample.calls:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(pieces)}}
            for call, pieces in sample.calls
        ]
        message |= {"content": text or None, "tool_calls": calls}
    if sample.reasoning:
        message |= _both_names("".join(sample.reasoning))
    return message


def _deltas_of(parts: Sequence[Part], sample: _Sample, parallel: bool) -> tuple[str, list[dict[str, Any]]]:
    """The text of the parts, and the deltas that say them. Calls are added to ``sample``; unless ``parallel`` the first
    one alone."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, (Text, Reasoning)):
            name = "content" if isinstance(part, Text) else "reasoning"
            if not deltas or "tool_calls" in deltas[-1]:
                deltas.append({})
            deltas[-1][name] = deltas[-1].get(name, "") + part.text
            continue
        if isinstance(part, Call):
            sample.num_calls += 1
        if sample.num_calls > 1 and not parallel:
            continue
        if isinstance(part, Call):
            sample.calls.append((part, []))
            fields: dict[str, Any] = {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        else:
            sample.calls[-1][1].append(part.text)
            fields = {"function": {"arguments": part.text}}
        deltas.append({"tool_calls": [{"index": len(sample.calls) - 1, **fields}]})
    for delta in deltas:
        if "reasoning" in delta:
            sample.reasoning.append(delta["reasoning"])
            delta |= _both_names(delta["reasoning"])
    return "".join(part.text for part in parts if isinstance(part, Text)), deltas


def _both_names(reasoning: str) -> dict[str, str]:
    """vLLM's and DeepSeek's."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _round(report: generation_pb2.RoundReport) -> dict[str, Any]:
    fields = {name: getattr(report, name) for name in (*_COUNTS, *_TIMES)}
    return fields | {"source": _ORIGINS.get(report.source)}
