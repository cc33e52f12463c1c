"""Tokens per pass and time of a target that drafts by itself, by the number of nodes: trees, and chains of as many.

    specdec bench heads --target MODEL --head DIRECTORY
    specdec bench heads --target MODEL --self-draft recycling

One sequence in one process, so that only the head differs. The questions are of other kinds than those of the trainer.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from specdec.cli.fetch import SmolLm2
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.settings import ModelServiceSettings
from specdec.runner.loading import load_runner
from target_service.heads.checkpoint import read_head
from target_service.heads.proof import proved
from target_service.language_model import LmVerifier
from target_service.self_draft.by_name import self_drafter
from target_service.self_draft.trees import SelfDraftTrees
from target_service.verifier import Decision, Job

QUESTIONS = (
    "My neighbour plays loud music every night. How should I talk to him?",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain.",
    "I have three eggs, flour and milk. What can I cook tonight?",
    "Plan a weekend in a city by the sea for two people who like walking.",
    "Why do we dream? Answer like a scientist, then like a grandmother.",
    "Write a function that counts the vowels of a word.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey?",
    "Turn this into a list: we need apples, a new broom, two light bulbs and bread.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one text."""

    tokens_per_pass: float
    ms_per_token: float
    ids: list[int]


def decode(
    verifier: LmVerifier, prompt: list[int], num_nodes: int, temperature: float, num_tokens: int, salt: bytes
) -> Row:
    spec = SequenceSpec(list(prompt), len(prompt), SamplingParams(temperature), 7, Method.COUPLED, salt)
    open_, state = TargetOpen(spec, max_self_draft_nodes=num_nodes), verifier.open(spec)
    ids, passes, started = list(prompt), 0, 0.0
    while len(ids) < len(prompt) + num_tokens:
        [decision], _ = verifier.verify([Job(open_, state, ids, self_draft_nodes=num_nodes)])
        if not isinstance(decision, Decision):
            assert decision is None, decision
            continue
        ids += [*(decision.self_draft.token_ids[node] for node in decision.accepted), decision.next_token]
        passes += 1
        started = started or time.perf_counter()  # after the prompt
    seconds, num = time.perf_counter() - started, len(ids) - len(prompt) - 1
    verifier.close(state)
    return Row(num / (passes - 1), seconds / num * 1e3, ids[: len(prompt) + num_tokens])


def main() -> None:
    fetched = SmolLm2.in_cache()
    parser = argparse.ArgumentParser("specdec bench heads", description="Tokens per pass of a target with its head.")
    parser.add_argument("--target", type=Path, default=fetched.target, help="checkpoint; default: the fetched model")
    parser.add_argument("--head", type=Path, default=fetched.head, help="directory of the head")
    parser.add_argument("--self-draft", help="a method without a head: recycling, or lookahead:W,N,G")
    parser.add_argument(
        "--nodes", type=int, nargs="*", default=[0, 2, 4, 8], help="nodes of a tree; 0: the target alone"
    )
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    settings = ModelServiceSettings(model=str(options.target), kv_slots=4096)
    runner = load_runner(settings)
    own = (
        self_drafter(options.self_draft, runner.info.vocab_size)
        if options.self_draft
        else proved(read_head(options.head), runner)
    )
    # A chain is the static tree of first guesses.
    chains = SelfDraftTrees(own.head, [[0] * max(1, *options.nodes)]) if isinstance(own, SelfDraftTrees) else own
    verifiers = [LmVerifier(runner, own), LmVerifier(runner, chains)]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    console = Console()
    settings_of = [(t, n, chain) for t in options.temperatures for n in options.nodes for chain in (False, True)]
    columns = ("temperature", "nodes", "tokens per pass", "of a chain", "ms per token", "over alone")
    table = Table(*columns, box=None)
    rows: dict[tuple[float, int, bool], list[Row]] = {setting: [] for setting in settings_of}
    for question in track(QUESTIONS, "Asking", console=console):
        for temperature, nodes, as_chain in settings_of:
            prompt = _prompt(tokenizer, question)
            salt = repr((temperature, nodes, as_chain)).encode()  # no setting learns from another one's answer
            found = decode(verifiers[as_chain], prompt, nodes, temperature, options.tokens, salt)
            rows[temperature, nodes, as_chain].append(found)
    num_wrong = 0
    for temperature in options.temperatures:
        alone = rows[temperature, 0, False]
        for nodes in options.nodes:
            tree, chain = rows[temperature, nodes, False], rows[temperature, nodes, True]
            num_wrong += sum(a.ids != b.ids for some in (tree, chain) for a, b in zip(some, alone, strict=True))
            speeds = [a.ms_per_token / b.ms_per_token for a, b in zip(alone, tree, strict=True)]
            table.add_row(
                f"{temperature:g}",
                str(nodes),
                f"{fmean(row.tokens_per_pass for row in tree):.2f}",
                f"{fmean(row.tokens_per_pass for row in chain):.2f}",
                f"{median(row.ms_per_token for row in tree):.1f}",
                f"{median(speeds):.2f} x",
            )
    console.print(table)
    console.print("All texts are equal." if not num_wrong else f"{num_wrong} texts DIFFER.")
    raise SystemExit(bool(num_wrong))


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


if __name__ == "__main__":
    main()
