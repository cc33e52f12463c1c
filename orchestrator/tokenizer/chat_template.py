"""Chat templates: a conversation -> the text of a prompt, as transformers renders it, without transformers.

Knows Jinja2 and the variables that templates use; does not know tokens and requests. A template is a program of the
model's author: it runs in a sandbox without access to Python's objects, and its output is bounded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.tokenizer.files import TokenizerFiles
from orchestrator.tokenizer.forms import Forms, find_forms
from specdec.core.errors import InvalidArgument
from specdec.runner.failures import in_words
from specdec.runner.files import read_json, read_text

log = logging.getLogger(__name__)

MAX_RENDERED = 1 << 22
"""Characters of a rendered prompt."""

GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"raise_exception", "strftime_now"}
)
"""Variables that a request cannot set by its ``variables``."""

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_END = "\ue000end of the last message\ue001"
"""Stands after the last message while a template renders it, to find where it ends. Not a character of any script."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages``: as OpenAI's API has them; the content a text, a list of parts with texts, or None. ``continues``:
    the prompt ends within the last message. ``variables``: further ones of the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """The template of a model, or several by name. Raises ValueError if one is no template."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: by the name of their variable, such as bos_token."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self.source = sources[_DEFAULT] if _DEFAULT in sources else next(iter(sources.values()))
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except Exception as error:  # a parser of a program, which its author may have nested in any way
            raise ValueError(f"the chat template cannot be read: {in_words(error)}") from error
        self._forms = {name: self._find_forms(name) for name in self._templates}

    @staticmethod
    def read(files: TokenizerFiles) -> ChatTemplate | None:
        """The template of a tokenizer; None if it has none. Raises ValueError if it cannot be read."""
        config = read_json(files.config)
        if files.template is not None:
            sources = {_DEFAULT: read_text(files.template)}
        elif isinstance(named := config.get("chat_template"), list):
            if not all(isinstance(entry, dict) and entry.keys() >= {"name", "template"} for entry in named):
                raise ValueError(f"{files.config}: chat_template has templates without a name or a text")
            sources = {str(entry["name"]): str(entry["template"]) for entry in named}
        else:
            sources = {_DEFAULT: named} if isinstance(named, str) else {}
        sources |= {file.stem: read_text(file) for file in files.further_templates}
        return ChatTemplate(sources, special_tokens(config)) if sources else None

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises InvalidArgument if the template refuses the conversation."""
        messages = list(conversation.messages)
        if conversation.continues:
            # A space after it shows whether the template keeps white space at the end of a message.
            messages[-1] = {**messages[-1], "content": _with_end(messages[-1]["content"])}
        name = _WITH_TOOLS if conversation.tools and _WITH_TOOLS in self._templates else _DEFAULT
        name = name if name in self._templates else next(iter(self._templates))
        variables = {
            **conversation.variables,
            "messages": self._forms[name].shaped(messages),
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.add_generation_prompt and not conversation.continues,
        }
        text = self._rendered(name, variables)
        return _cut(text) if conversation.continues else text

    def _rendered(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            return _bounded(self._templates[name].generate({**self._special_tokens, "documents": None, **variables}))
        except InvalidArgument:
            raise
        except Exception as error:  # a template is a program, which fails in any way
            raise InvalidArgument([("chat", f"the chat template refuses it: {error}")]) from error

    def _find_forms(self, name: str) -> Forms:
        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                return self._rendered(name, {"messages": messages, "tools": tools, "add_generation_prompt": True})
            except InvalidArgument:
                return None

        forms = find_forms(render)
        log.info("forms of a chat template", extra={"template": name, **forms.in_words})
        if forms.lost:
            log.warning(
                "a chat template leaves out parts of conversations", extra={"template": name, "parts": forms.lost}
            )
        return forms


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names, by their key, such as bos_token."""
    tokens = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            tokens[key] = token
    return tokens


def _with_end(content: Any) -> Any:
    """A content with the mark of its end."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END} "}]
    return f"{content or ''}{_END} "


def _bounded(parts: Any) -> str:
    texts, length = [], 0
    for part in parts:
        texts.append(part)
        length += len(part)
        if length > MAX_RENDERED:
            raise InvalidArgument([("chat", f"the prompt that the chat template makes is over {MAX_RENDERED} long")])
    return "".join(texts)


def _cut(text: str) -> str:
    """The text up to the end of the last message."""
    end = text.rfind(_END)
    if end < 0:
        problem = "the chat template does not show the last message as it is, so that it cannot be continued"
        raise InvalidArgument([("chat.continue_final_message", problem)])
    return text[:end] if text.startswith(" ", end + len(_END)) else text[:end].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes < and > as escapes, and sorts keys: another prompt for the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training: here it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
