"""What an answer has to look like: response formats, structured outputs and forced tool calls -> fields of a request.

Knows the names of OpenAI and vLLM; does not know grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gateway.errors import HttpError
from gateway.parsing import Few, HistoryBody, StrictBody

_DEFINITIONS = ("$defs", "definitions")
ANY_OBJECT = '{"type": "object"}'


class JsonSchema(StrictBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """A schema holds whether it is strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of the type json_object")

    @model_validator(mode="after")
    def _together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self


class StructuredOutputs(StrictBody):
    """As vLLM has it: one form."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[Few[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if [self.json_, self.regex, self.choice, self.grammar, self.json_object].count(None) != 4:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object is required")
        return self


class Function(HistoryBody):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_schemas(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in _DEFINITIONS:
            if not isinstance(value.get(name, {}), dict):
                raise ValueError(f"{name} is not an object")
        return value


class Tool(HistoryBody):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(StrictBody):
    name: str


class NamedChoice(StrictBody):
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedChoice


def grammar_of_format(form: ResponseFormat | None) -> dict[str, Any]:
    if form is None or form.type == "text":
        return {}
    schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
    return {"json_schema": ANY_OBJECT if schema is None else json.dumps(schema)}


def grammar_of_outputs(outputs: StructuredOutputs | None) -> dict[str, Any]:
    if outputs is None:
        return {}
    schema = json.dumps(outputs.json_) if isinstance(outputs.json_, dict) else outputs.json_
    fields = {
        "json_schema": ANY_OBJECT if outputs.json_object else schema,
        "regex": outputs.regex,
        "choices": outputs.choice,
        "grammar": outputs.grammar,
    }
    return {name: value for name, value in fields.items() if value is not None}


def only_grammar(grammars: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of the one grammar that is not empty. ``grammars``: by the field that asks for it. Raises HttpError if
    several are not."""
    names = [name for name, fields in grammars.items() if fields]
    if len(names) > 1:
        raise HttpError(400, f"{names[1]}: not possible with {names[0]}", param=names[1])
    return grammars[names[0]] if names else {}


def grammar_of_tools(tools: Sequence[Tool], choice: Choice, max_calls: int) -> dict[str, Any]:
    """The grammar of a choice that forces a call: the arguments of a named function, or a list of at most
    ``max_calls`` calls. Raises HttpError."""
    if isinstance(choice, NamedChoice):
        named = [tool.function for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise HttpError(400, f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice")
        return {"json_schema": json.dumps(_closed(named[0].parameters))}
    if choice != "required":
        return {}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _closed(tool.function.parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # References are by path from the root of a schema, so what they lead to moves there.
    definitions: dict[str, Any] = {}
    for tool in tools:
        for key in _DEFINITIONS:
            for name, schema in tool.function.parameters.get(key, {}).items():
                if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise HttpError(400, f"tools: two of them define {name!r} in {key}, and not alike", param="tools")
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {
        "json_schema": json.dumps(
            {"type": "array", "items": items, "minItems": 1, "maxItems": max_calls, **definitions}
        )
    }


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without other arguments, unless the schema speaks of them."""
    if parameters.get("type") == "object" and "properties" in parameters:
        return {"additionalProperties": False, **parameters}
    return parameters
