"""``python -m tests.clients.scripted PORT``: a gateway in front of a target that reads its prompt and follows a script.

It calls the first tool when it is asked for the weather, answers with what the tool said, and otherwise counts what it
was asked. It reasons first, and writes in the format of Qwen 3: loops of tools of any client end in the same way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from specdec.core.sequence import SequenceSpec
from specdec.telemetry.prometheus import Scrape
from testing.raw import started
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.checkout import TOKENIZER
from tests.clients.scene import MODEL
from tests.cluster import cluster
from tests.gateway.test_conversations import with_template
from tests.orchestrator.tokenizer.template_styles import STYLES

END = 0
TURN = "<|im_start|>user\n"


def answer(prompt: str) -> str:
    last_turn = prompt.rpartition(TURN)[2]
    if "<tool_response>" in last_turn:
        degrees = re.search(r"-?\d+ degrees", last_turn)
        return f"<think>\nThe tool knows.\n</think>\n\nIt is {degrees[0] if degrees else 'unknown'} in Bern."
    tool = re.search(r'<tools>.*?"name": "(\w+)"', prompt, re.DOTALL)
    if tool and "weather" in last_turn:
        call = f'{{"name": "{tool[1]}", "arguments": {{"city": "Bern"}}}}'
        return f"<think>\nA tool may know.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    num_questions = prompt.count(TURN) - prompt.count(TURN + "<tool_response>")
    return f"<think>\nI count.\n</think>\n\nYou asked {num_questions} times."


@cache
def answer_ids(prompt_ids: tuple[int, ...]) -> list[int]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids: list[int] = tokenizer.encode(answer(tokenizer.decode(prompt_ids)), add_special_tokens=False).ids
    return [*ids, END]


class Script(Table):
    """A table of the answers' tokens."""

    def next_token(self, spec: SequenceSpec, tail: Sequence[int], position: int) -> int:
        ids = answer_ids(tuple(spec.token_ids[: spec.num_prompt_tokens]))
        return ids[min(position - spec.num_prompt_tokens, len(ids) - 1)]


async def serve(port: int, directory: Path) -> None:
    script = Script(vocab_size=4096)
    verifier, drafter = TableVerifier(script), TableDrafter(script)
    for model in (verifier, drafter):
        model.info = dataclasses.replace(model.info, tokenizer_fingerprint="", eos_token_ids=(END,))
    async with cluster([verifier], [drafter], tokenizer=with_template(directory, STYLES["Qwen 3"].source)) as services:
        at = f"127.0.0.1:{services.orchestrator.port}"
        settings = GatewaySettings(orchestrator=[at], served_model_name=[MODEL], reasoning_format="think", port=port)
        async with started(GatewayServer(settings, Scrape())):
            ended = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
            await ended.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(serve(int(sys.argv[1]), Path(directory)))
