"""Instructor, in its modes of tools and of schemas."""

from __future__ import annotations

import instructor
from openai import OpenAI

from tests.clients import scene
from tests.clients.scene import MODEL, Servers

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
)
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": scene.ORDER}], "max_tokens": 200, "max_retries": 1}


def client(servers: Servers, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=servers.demo), mode=mode)


def structured_output(servers: Servers) -> None:
    for mode in MODES:
        assert isinstance(client(servers, mode).create(response_model=scene.Order, **REQUEST), scene.Order), mode


def streams(servers: Servers) -> None:
    for mode in MODES:
        partial = list(client(servers, mode).create_partial(response_model=scene.Order, **REQUEST))
        assert len(partial) > 1, f"{mode}: in one piece"
        scene.Order.model_validate(partial[-1].model_dump())


if __name__ == "__main__":
    scene.run("instructor", structured_output, streams)
