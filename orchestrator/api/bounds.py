"""Size limits of a request, checked before anything else of it is read. Knows sizes; does not know meanings.

A message may have MAX_REQUEST_BYTES, enough for millions of entries. Sorting these would block the event loop for all
requests, and a refusal that names each would be longer than a status may be.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.api.chat import MAX_MESSAGES, text_length
from specdec.transport.sampling_wire import MAX_ALLOWED_TOKENS, MAX_BIASES
from specdec.transport.wire import MAX_SALT_BYTES
from specdec.v1 import generation_pb2

MAX_REQUEST_BYTES = 1 << 22
"""Enough for a million ids and those to resume. gRPC parses a message on the event loop: this one in 0.1 s at most."""
MAX_PROMPT_BYTES = 1 << 20
MAX_SAMPLES = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_BAD_WORDS = 128
MAX_PROMPT_LOGPROBS = 1 << 18
"""Logprobs of a prompt, those of the most likely tokens included: some MiB, which the target keeps until the end."""
MAX_RESUMED_IDS = 1 << 18
MAX_REQUEST_ID = 128
MAX_DETOKENIZED_IDS = 1 << 20

_MANY = 1 << 13
"""Characters and ids that are read in some 3 ms. More of them wait for a thread, behind larger ones."""


def size_problems(message: generation_pb2.GenerateRequest, context_length: int) -> Iterator[tuple[str, str]]:
    """(field, problem) for everything that is too long."""
    yield from prompt_size_problems(message)
    if (size := len(message.prediction.encode())) > MAX_PROMPT_BYTES:
        yield "prediction", f"at most {MAX_PROMPT_BYTES} bytes, not {size}"
    if (size := len(message.cache_salt.encode())) > MAX_SALT_BYTES:
        yield "cache_salt", f"at most {MAX_SALT_BYTES} bytes, not {size}"
    for name, max_length, unit in (
        ("stop", MAX_STOPS, "strings"),
        ("stop_token_ids", MAX_STOP_TOKENS, "ids"),
        ("logit_bias", MAX_BIASES, "tokens"),
        ("allowed_token_ids", MAX_ALLOWED_TOKENS, "ids"),
        ("bad_words", MAX_BAD_WORDS, "texts"),
        ("resume", MAX_SAMPLES, "samples"),
    ):
        if (length := len(getattr(message, name))) > max_length:
            yield name, f"at most {max_length} {unit}, not {length}"
        elif name == "resume":
            for index, received in message.resume.items():
                if len(received.token_ids) > context_length:
                    yield f"resume[{index}]", f"has more ids than the context of {context_length}"
            if (total := sum(len(received.token_ids) for received in message.resume.values())) > MAX_RESUMED_IDS:
                yield "resume", f"at most {MAX_RESUMED_IDS} ids in all, not {total}"


def prompt_size_problems(
    message: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest,
) -> Iterator[tuple[str, str]]:
    """(field, problem) for a text or a conversation that is too long."""
    if (size := len(message.text.encode())) > MAX_PROMPT_BYTES:
        yield "text", f"at most {MAX_PROMPT_BYTES} bytes, not {size}: send token_ids"
    if (length := len(message.chat.messages)) > MAX_MESSAGES:
        yield "chat.messages", f"at most {MAX_MESSAGES} messages, not {length}"
    elif (size := text_length(message.chat)) > MAX_PROMPT_BYTES:
        yield "chat", f"at most {MAX_PROMPT_BYTES} bytes, not {size}: send token_ids"


def is_long(message: generation_pb2.GenerateRequest) -> bool:
    """Whether reading the prompt and the ids to resume takes longer than the event loop may stand still."""
    num_resumed = sum(len(received.token_ids) for received in message.resume.values())
    num_characters = len(message.text) + text_length(message.chat) + len(message.prediction)
    num_characters += 2 * sum(map(len, message.bad_words))
    return num_characters + len(message.token_ids.token_ids) + num_resumed > _MANY
