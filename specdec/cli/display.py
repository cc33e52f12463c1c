"""Prints streamed text and marks the draft's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text

from specdec.client import Client, Sample
from specdec.v1 import generation_pb2

DRAFT_STYLE = "bold underline green"


_PROPOSED = (generation_pb2.TOKEN_ORIGIN_DRAFT, generation_pb2.TOKEN_ORIGIN_LOOKUP)


class MarkedText:
    """Prints a sample as it grows. Tokens that the draft proposed are underlined, bold and green on a terminal,
    and stand between «» anywhere else."""

    def __init__(self, console: Console, marks: bool = True) -> None:
        self._console = console
        self._marks = marks
        self._num_tokens = 0
        self._num_characters = 0
        self._inside = False

    def show(self, sample: Sample) -> None:
        """Print new text up to the end of the last token, or all of it once the sample is finished."""
        for origin, end in zip(sample.origins[self._num_tokens :], sample.text_ends[self._num_tokens :], strict=True):
            self._print(sample.text[self._num_characters : end], origin in _PROPOSED)
            self._num_characters = end
        self._num_tokens = len(sample.origins)
        if sample.finish.reason:
            self._print(sample.text[self._num_characters :], drafted=False)
            self._num_characters = len(sample.text)

    @property
    def legend(self) -> Text:
        """The meaning of the marks."""
        if self._console.is_terminal:
            return Text.assemble(("underlined", DRAFT_STYLE), " tokens were proposed by the draft")
        return Text("tokens between «» were proposed by the draft")

    def _print(self, text: str, drafted: bool) -> None:
        drafted = drafted and self._marks
        if self._console.is_terminal:
            self._console.print(Text(text, DRAFT_STYLE if drafted else ""), end="", soft_wrap=True)
            return
        mark = "«" if drafted and not self._inside else "»" if self._inside and not drafted else ""
        self._inside = drafted
        self._console.file.write(mark + text)
        self._console.file.flush()

    def end(self) -> None:
        """Close an open mark and the line."""
        if self._inside:
            self._console.file.write("»")
            self._inside = False
        self._console.file.write("\n")
        self._console.file.flush()


async def print_answer(
    connect: Callable[[], Client], fields: dict[str, Any], *, timeout_s: float | None, as_json: bool
) -> None:
    """Print the text of a request's answer as it streams, or one JSON object at its end. Raises SpecdecError."""
    console, sample, seed = Console(), Sample(), 0
    # Marks only on a terminal, so that a pipe gets the plain text.
    text = MarkedText(console, marks=console.is_terminal)
    async with connect() as client:
        async for response in client.stream(timeout_s, **fields):
            if response.HasField("admission"):
                seed = response.admission.seed
            elif response.HasField("chunk"):
                sample.add(response.chunk)
                if not as_json:
                    text.show(sample)
    if as_json:
        print(json.dumps(_as_dict(sample, seed)))
    else:
        text.end()


def _as_dict(sample: Sample, seed: int) -> dict[str, Any]:
    finish = sample.finish
    reason = generation_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()

    def plain(message: Any) -> dict[str, Any]:
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": reason,
        "seed": seed,
        "usage": plain(finish.usage),
        "speculation": plain(finish.speculation),
    }
