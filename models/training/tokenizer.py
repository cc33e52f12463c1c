"""The byte-level BPE tokenizer that both models of the pair share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCABULARY = 4096
CONTEXT = 2048
END_OF_TEXT = "<|endoftext|>"


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer trained on the texts. Encoding and decoding leave every string unchanged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, and the configuration that transformers needs to load it from the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that separates documents and ends a generation. Raises ValueError if it is missing."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT}")
    return token


def load(directory: Path) -> Tokenizer:
    """Load the tokenizer that is saved in a directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
