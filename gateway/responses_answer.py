"""The answer to /v1/responses: what a chat answers, as the items of a response, whole and by events.

Knows OpenAI's shapes; does not know where the answer of the chat comes from (gateway.answers).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.answers import Answer
from gateway.errors import HttpError
from gateway.responses_body import ResponsesBody
from specdec.v1 import generation_pb2

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """An item, and how its events are named. ``text``: those of its text. ``part``: those of the part that has the
    text. ``holder``: the field that holds this part."""

    type: str
    prefix: str
    text: str
    part: str = ""
    holder: str = ""


_MESSAGE = _Kind("message", "msg", "output_text", part="content_part", holder="content")
_REASONING = _Kind("reasoning", "rs", "reasoning_text", part="content_part", holder="content")
_SUMMARY = _Kind("reasoning", "rs", "reasoning_summary_text", part="reasoning_summary_part", holder="summary")
_CALL = _Kind("function_call", "fc", "function_call_arguments")


@dataclass(slots=True)
class _Writing:
    """The last item, which is not complete."""

    kind: _Kind
    item: dict[str, Any]
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def place(self) -> dict[str, Any]:
        """Where an event of its text belongs."""
        inner = {f"{self.kind.holder}_index": 0} if self.kind.holder else {}
        return {"item_id": self.item["id"], "output_index": self.index, **inner}


class ResponsesAnswer:
    """The answer to one request, as gateway.answers.Answer has it. An event is valid until the next one is asked for:
    it shares its items with the response."""

    def __init__(self, body: ResponsesBody, chat: Answer) -> None:
        self.body = chat.body
        self.route = "responses"
        self._chat = chat
        self._reasoning = _SUMMARY if body.reasoning and body.reasoning.summary else _REASONING
        self._output: list[dict[str, Any]] = []
        self._writing: _Writing | None = None
        self._waiting_logprobs: list[Any] = []  # of tokens without a text so far
        self._num_events = 0
        self._is_cut = False
        self._response: dict[str, Any] = {
            "id": f"resp_{chat.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": chat.model,
            "output": self._output,
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage", "previous_response_id")),
            **_settings(body),
        }

    def collect(self, prompt: int, response: generation_pb2.GenerateResponse) -> None:
        for _ in self.chunks(prompt, response):
            pass

    def whole(self) -> dict[str, Any]:
        for _ in self.ends():
            pass
        return self._response

    def chunks(self, prompt: int, response: generation_pb2.GenerateResponse) -> Iterator[Event]:
        if response.HasField("admission"):
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        for chunk in self._chat.chunks(prompt, response):
            [choice] = chunk["choices"]
            yield from self._delta(choice["delta"], (choice["logprobs"] or {}).get("content") or [])
            self._is_cut = choice["finish_reason"] == "length"

    def ends(self) -> Iterator[Event]:
        if not any(item["type"] != "reasoning" for item in self._output):
            yield from self._begin(_MESSAGE)
        status = "incomplete" if self._is_cut else "completed"
        yield from self._finish(status)
        self._response |= {"status": status, "usage": _usage(self._chat.usage.tokens)}
        if self._is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        if (speculation := self._chat.usage.speculation) is not None:
            self._response["metrics"] = speculation
        yield self._event(f"response.{status}", response=self._response)

    def failed(self, error: HttpError) -> Iterator[Event]:
        """An item that is not complete is left out: clients would run half of a call."""
        if self._writing is not None:
            self._output.pop()
        cause = error.body["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": cause["message"]}}
        yield self._event("response.failed", response=self._response)

    def _delta(self, delta: dict[str, Any], logprobs: list[Any]) -> Iterator[Event]:
        """The events of a delta of chat. Logprobs are given of the text alone."""
        if delta.get("reasoning"):
            yield from self._write(self._reasoning, delta["reasoning"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin(_CALL, call_id=call["id"], name=call["function"]["name"], arguments="")
            yield from self._write(_CALL, call["function"]["arguments"])
        self._waiting_logprobs += logprobs
        if delta.get("content"):
            yield from self._write(_MESSAGE, delta["content"])
        elif self._writing is not None and self._writing.kind is not _MESSAGE:
            self._waiting_logprobs = []

    def _write(self, kind: _Kind, text: str) -> Iterator[Event]:
        """Add to the last item, or to a new one."""
        if self._writing is None or self._writing.kind is not kind:
            yield from self._begin(kind)
        assert self._writing is not None
        if not text:
            return
        self._writing.pieces.append(text)
        event = self._event(f"response.{kind.text}.delta", **self._writing.place(), delta=text)
        if kind is _MESSAGE:
            event["logprobs"] = self._take_logprobs()
        yield event

    def _take_logprobs(self) -> list[Any]:
        assert self._writing is not None
        logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        self._writing.logprobs += logprobs
        return logprobs

    def _begin(self, kind: _Kind, **fields: Any) -> Iterator[Event]:
        yield from self._finish("completed")
        item: dict[str, Any] = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", "type": kind.type, "status": "in_progress"}
        if kind is _MESSAGE:
            item |= {"role": "assistant", "content": []}
        elif kind is not _CALL:
            item |= {"summary": [], kind.holder: []}
        writing = self._writing = _Writing(kind, item | fields, len(self._output))
        self._output.append(writing.item)
        yield self._event("response.output_item.added", output_index=writing.index, item=writing.item)
        if kind.part:
            yield self._event(f"response.{kind.part}.added", **writing.place(), part=_part(writing, ""))

    def _finish(self, status: str) -> Iterator[Event]:
        """The last item is complete, or will never be."""
        writing = self._writing
        if writing is None:
            return
        kind, text = writing.kind, "".join(writing.pieces)
        fields: dict[str, Any] = {"text": text}
        if kind is _CALL:
            writing.item["arguments"] = text
            fields = {"name": writing.item["name"], "arguments": text}
        elif kind is _MESSAGE:
            self._take_logprobs()
            fields["logprobs"] = writing.logprobs
        yield self._event(f"response.{kind.text}.done", **writing.place(), **fields)
        if kind.part:
            part = _part(writing, text)
            writing.item[kind.holder] = [part]
            yield self._event(f"response.{kind.part}.done", **writing.place(), part=part)
        writing.item["status"] = status
        self._writing = None
        yield self._event("response.output_item.done", output_index=writing.index, item=writing.item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _part(writing: _Writing, text: str) -> dict[str, Any]:
    kind = "summary_text" if writing.kind is _SUMMARY else writing.kind.text
    of_message = {"annotations": [], "logprobs": writing.logprobs} if writing.kind is _MESSAGE else {}
    return {"type": kind, "text": text, **of_message}


def _usage(tokens: dict[str, Any]) -> dict[str, Any]:
    """By the names of responses."""
    reasoning = tokens.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cached = tokens["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": tokens["total_tokens"],
    }


def _settings(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request. Null: the server's default."""
    same = (
        *("instructions", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "presence_penalty"),
        *("frequency_penalty", "user", "safety_identifier", "prompt_cache_key"),
    )
    text = body.text.model_dump(by_alias=True, exclude_unset=True) if body.text else {}
    reasoning = body.reasoning.model_dump(exclude_unset=True) if body.reasoning else {}
    choice = body.tool_choice or "auto"
    return {name: getattr(body, name) for name in same} | {
        "tools": [{"strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
        "store": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
    }
