"""The forms in which a chat template takes contents and arguments, found by rendering conversations that are known.

A template is written for one form of a message: content as text or in parts, arguments as an object or as JSON. In
another form it fails, or drops what was said without a word. Knows messages; does not know how a template is rendered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str | None]
"""Messages and tools -> the text of a prompt. None: the template refuses them."""

MAX_DEPTH = 100
"""Lists and objects within each other in a JSON text. What reads and writes them calls itself for each."""

Content = Literal["as it is", "text", "one part"]
Nothing = Literal["absent", "empty", "no parts", "empty part", "null"]
Arguments = Literal["object", "JSON", "wrapped"]

ROLES = ("user", "system", "assistant", "tool")

_TOOL = {"type": "object", "properties": {"p1041": {"type": "string"}}, "required": ["p1041"]}
_TOOLS = [{"type": "function", "function": {"name": "f1047", "description": "d", "parameters": _TOOL}}]
# Texts that no template has, and that stay themselves in capitals, without spaces and in quotes.
_ARGUMENTS, _BROKEN = '{"p1041": "v1059"}', '{"p1041": "v1059'
_CALL = ("f1047", "p1041", "v1059")
_CALLED = {
    **dict.fromkeys(("calls", "calls with long ids", "calls beside text"), _CALL),
    "several calls": (*_CALL, "v1061"),
    "broken calls": ("v1059",),
}
_REPRS = ("{'type': 'text'", '{"type": "text"', "{'p1041'")
"""A list of parts or an object that a template took for a text."""


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True, slots=True)
class Forms:
    """Those of one template. Of a content by its role, the user's for roles that are not here."""

    text: Mapping[str, Content] = field(default_factory=dict)
    parts: Mapping[str, Content] = field(default_factory=dict)
    developer: Literal["developer", "system"] = "developer"
    """The role of what OpenAI's clients say to reasoning models in place of a system."""
    null_beside_calls: Nothing = "absent"
    empty_beside_calls: Nothing = "empty"
    arguments: Arguments = "object"
    broken_arguments: Arguments = "JSON"
    short_ids: bool = False
    """Ids of calls have nine characters, as Mistral's templates demand."""
    one_call: bool = False
    """A message has one call: further ones are messages behind it."""
    calls_apart: bool = False
    """Text beside calls is a message before them."""
    lost: tuple[str, ...] = ()
    """What the template shows in no form."""

    def shaped(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as OpenAI's API has them, in the forms that the template takes."""
        return [self._shaped(part) for message in messages for part in self._apart(message)]

    def _apart(self, message: Message) -> list[Message]:
        calls = message.get("tool_calls") or ()
        if self.one_call and len(calls) > 1:
            further = [{"role": message["role"], "content": None, "tool_calls": [call]} for call in calls[1:]]
            return [*self._apart({**message, "tool_calls": calls[:1]}), *further]
        if self.calls_apart and calls and text_of(message.get("content")):
            text = {name: value for name, value in message.items() if name != "tool_calls"}
            return [text, {"role": message["role"], "content": None, "tool_calls": calls}]
        return [message]

    def _shaped(self, message: Message) -> dict[str, Any]:
        if message["role"] == "developer":
            message = {**message, "role": self.developer}
        shaped = {**message, **self._content(message)}
        if shaped["content"] is _ABSENT:
            del shaped["content"]
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if self.short_ids and message.get("tool_call_id"):
            shaped["tool_call_id"] = short_id(message["tool_call_id"])
        return shaped

    def _content(self, message: Message) -> dict[str, Any]:
        content, role = message.get("content"), message["role"]
        if not text_of(content) and message.get("tool_calls"):
            return {"content": _NOTHING[self.null_beside_calls if content is None else self.empty_beside_calls]}
        forms = self.parts if isinstance(content, list) else self.text
        return {"content": _in_form("" if content is None else content, forms.get(role, forms.get("user", "as it is")))}

    def _call(self, call: Message) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        value = json_object(arguments) if isinstance(arguments, str) else arguments
        form = self.arguments if value is not None else self.broken_arguments
        if form == "JSON":
            value = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif value is None:
            value = {"arguments": arguments}
        ids = {"id": short_id(call["id"])} if self.short_ids else {}
        return {**call, **ids, "function": {**call["function"], "arguments": value}}

    @property
    def in_words(self) -> dict[str, Any]:
        """For a log."""
        return {name: value for name, value in asdict(self).items() if name != "lost"}


_FORMS_OF_CALLS = [
    {"arguments": arguments, "null_beside_calls": nothing}
    for arguments in ("object", "JSON")
    for nothing in get_args(Nothing)
]
_ABSENT = object()
_NOTHING: Mapping[Nothing, Any] = {
    "absent": _ABSENT,
    "empty": "",
    "no parts": [],
    "empty part": _parts(""),
    "null": None,
}


def find_forms(render: Render) -> Forms:
    """The forms of a template: what transformers renders for OpenAI's message where that shows all of it, else the
    first form that shows the most."""
    forms, lost = Forms(), list[str]()
    for role in ROLES:
        for kind, content in (("text", "c1063"), ("parts", _parts("c1063", "c1069"))):
            options = [{**getattr(forms, kind), role: option} for option in get_args(Content)]
            forms, is_lost = _best(forms, [{kind: option} for option in options], render, role, content)
            lost += [f"{kind} of {role}"] if is_lost else []
        if role == "assistant":
            forms, is_lost = _best(forms, _FORMS_OF_CALLS, render, "calls", None)
            lost += ["calls of tools"] if is_lost else []
            nothing = sorted(get_args(Nothing), key=lambda option: option != "empty")
            forms, _ = _best(forms, [{"empty_beside_calls": option} for option in nothing], render, "calls", "")
            options = [{"broken_arguments": option} for option in ("JSON", "wrapped")]
            forms, _ = _best(forms, options, render, "broken calls", None)
            for name, kind in (("short_ids", "calls with long ids"), ("one_call", "several calls")):
                forms, _ = _best(forms, [{name: False}, {name: True}], render, kind, None)
            options = [{"calls_apart": False}, {"calls_apart": True}]
            forms, is_lost = _best(forms, options, render, "calls beside text", "c1063")
            lost += ["text beside calls"] if is_lost and "calls of tools" not in lost else []
    forms, _ = _best(forms, [{"developer": role} for role in ("developer", "system")], render, "developer", "c1063")
    return replace(forms, lost=tuple(lost))


def short_id(identity: str) -> str:
    """Nine characters, the same for the same id."""
    is_short = len(identity) == 9 and identity.isalnum()
    return identity if is_short else hashlib.sha256(identity.encode()).hexdigest()[:9]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text is, of which a prompt can show all; None: it is none."""
    try:
        value = json.loads(text or "{}")
        return value if isinstance(value, dict) and not is_deep(value) and is_sound(text, value) else None
    except (ValueError, RecursionError):
        return None


def is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, (dict, list))]
    return bool(level)


def is_sound(text: str, value: Any) -> bool:
    """Whether a value of JSON has no half of a surrogate pair: JSON may have one, a prompt may not."""
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
    return True


def text_of(content: Any) -> str:
    """The text of a content, that of its parts joined by line ends."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _in_form(content: Any, form: Content) -> Any:
    if form == "as it is":
        return content
    return text_of(content) if form == "text" else _parts(text_of(content))


def _conversations(kind: str, content: Any) -> Iterator[list[Message]]:
    """With a message of this kind, in the places where templates allow it."""
    user: Message = {"role": "user", "content": "u1013"}
    said: Message = {"role": kind, "content": content}
    identity = "call_0123456789abcdef" if kind == "calls with long ids" else "call01031"
    given = {
        "broken calls": {identity: _BROKEN},
        "several calls": {identity: _ARGUMENTS, "call01033": _ARGUMENTS.replace("v1059", "v1061")},
    }.get(kind, {identity: _ARGUMENTS})
    called = [
        {"id": identity, "type": "function", "function": {"name": "f1047", "arguments": arguments}}
        for identity, arguments in given.items()
    ]
    calls: Message = {"role": "assistant", "content": content if "calls" in kind else None, "tool_calls": called}
    results: list[Message] = [
        {"role": "tool", "tool_call_id": identity, "name": "f1047", "content": "r1021"} for identity in given
    ]
    if kind == "user":
        yield from ([said], [{"role": "system", "content": "s1009"}, said])
    elif kind in ("system", "developer"):
        yield [said, user]
    elif kind == "assistant":
        yield from ([user, said, user], [user, said])
    elif kind == "tool":
        yield [user, calls, {**results[0], "content": content}]
    else:
        yield from ([user, calls, *results], [user, calls, user])


def _best(
    forms: Forms, options: Sequence[Mapping[str, Any]], render: Render, kind: str, content: Any
) -> tuple[Forms, bool]:
    """The forms with the first of the options that show the most, and whether they leave something out. Unchanged if
    the template refuses all of them: it will say so to callers."""
    expected = [*_CALLED.get(kind, ()), *text_of(content).split()]
    candidates = [replace(forms, **option) for option in options]
    for messages in _conversations(kind, content):
        costs = [_cost(candidate, render, messages, expected) for candidate in candidates]
        if rendered := [cost for cost in costs if cost is not None]:
            best = min(rendered)
            return candidates[costs.index(best)], best[0] > 0
    return forms, False


def _cost(forms: Forms, render: Render, messages: Sequence[Message], expected: Sequence[str]) -> tuple[int, int] | None:
    """How much of what is expected the prompt lacks, and how often it has another thing in its place. None: refused."""
    text = render(forms.shaped(messages), _TOOLS)
    if text is None:
        return None
    text = text.lower()
    return sum(word not in text for word in expected), sum(text.count(form) for form in _REPRS)
