"""The pairs of checkpoints and their prompts. Does not know the measurements."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from bench.models.damped_pair import Pair, damped_pair
from bench.peers.prompts import PromptSource
from specdec.cli.demo import MODELS
from specdec.cli.fetch import SmolLm2


class PairName(StrEnum):
    smollm2 = "smollm2"
    damped = "damped"
    bundled = "bundled"


LABELS = {
    PairName.smollm2: "SmolLM2-135M-Instruct; a draft of 11.5 million weights",
    PairName.damped: "damped pair: random weights, a model of costs and not of text",
    PairName.bundled: "bundled pair: small models of Python source, held-out text",
}


def find(name: PairName, cache: Path) -> tuple[Pair, PromptSource]:
    """The pair, and prompts for it. The damped pair is made in ``cache``. Raises FileNotFoundError with what to do."""
    if name is PairName.damped:
        pair = damped_pair(cache)
        return pair, PromptSource(_vocab_size(pair))
    fetched = SmolLm2.in_cache()
    pair = (
        Pair(fetched.target, fetched.draft) if name is PairName.smollm2 else Pair(MODELS / "target", MODELS / "draft")
    )
    if not (pair.target.is_dir() and pair.draft.is_dir()):
        raise FileNotFoundError(f"there is no {pair.target}: specdec fetch {name} makes it")
    return pair, PromptSource.of_bundled(MODELS, _vocab_size(pair), model=pair.target)


def _vocab_size(pair: Pair) -> int:
    size: int = Tokenizer.from_file(str(pair.target / "tokenizer.json")).get_vocab_size()
    return size
