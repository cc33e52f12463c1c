"""A model's files and its identity (digest, vocabulary, context length). Does not load weights.

What a model is comes from transformers' own configuration classes, which know the defaults of each architecture.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from specdec.core.rounds import ModelInfo
from specdec.runner import files, weights
from specdec.runner.failures import in_words
from specdec.runner.vocabulary import Vocabulary, read_vocabulary

log = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLING_VERSION = "2"
"""Part of every digest; to be raised when the same weights and seed would give another text."""

_DIGEST_VERSION = "4"
_HASHING_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on this machine in Hugging Face format."""

    directory: Path
    dtype: str
    info: ModelInfo

    @staticmethod
    def find(
        model: str,
        dtype: str,
        backend: str = "",
        fingerprint: str = "",
        revision: str = "",
        quantised: bool = False,
    ) -> Checkpoint:
        """Find the checkpoint ``model``, a directory or a hub id (fetched, or from the hub's cache).

        ``dtype`` "auto" is the checkpoint's own; ``backend`` and ``fingerprint``: see specdec.backends.base.Backend;
        ``revision`` is that of a hub id. Raises ValueError, with a message for the operator, if it is no checkpoint in
        safetensors, of plain weights unless the engine takes ``quantised`` ones.
        """
        directory = files.directory_of(model, revision)
        config = _config(directory)
        if not quantised:
            _refuse_quantised(config)
        if named := getattr(config, "transformers_weights", None):
            raise ValueError(f"its config.json names weights of its own (transformers_weights: {named})")
        names = files.weight_files(directory)
        stored = weights.check_files((directory / name for name in names), quantised)
        text_config: Any = config.get_text_config()
        if dtype == "auto":
            dtype = _own_dtype(text_config) or _own_dtype(config) or weights.DTYPES.get(stored, "float32")
        vocab_size, vocabulary, eos_token_ids = _drawable(directory, config, _positive(text_config, "vocab_size"))
        tokenizer = vocabulary.fingerprint
        # These affect the tokens that may be drawn, and the end of a text.
        facts = {"dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer, "eos_token_ids": eos_token_ids}
        facts["backend"] = fingerprint
        info = ModelInfo(
            name=directory.resolve().name if Path(model).is_dir() else model,
            model_digest=_digest(directory, ["config.json", *names], facts),
            vocab_size=vocab_size,
            tokenizer_fingerprint=tokenizer,
            context_length=_context_length(text_config),
            dtype=dtype,
            eos_token_ids=eos_token_ids,
            backend=backend,
            tokens=vocabulary.tokens,
        )
        return Checkpoint(directory, dtype, info)


def vocabulary_of(directory: Path) -> ModelInfo:
    """What a model in ``directory``, of which there may be the tokenizer alone, tells of its vocabulary.

    Raises ValueError, with a message for the operator, if there is no tokenizer.
    """
    if not (directory / files.TOKENIZER).is_file():
        raise ValueError(f"{directory} has no {files.TOKENIZER}")
    has_config = (directory / "config.json").is_file()
    config = _config(directory) if has_config else PreTrainedConfig()
    num_rows = _positive(config.get_text_config(), "vocab_size") if has_config else sys.maxsize
    vocab_size, vocabulary, ends = _drawable(directory, config, num_rows)
    return ModelInfo(
        name="",
        model_digest="",
        vocab_size=vocab_size,
        tokenizer_fingerprint=vocabulary.fingerprint,
        context_length=0,
        eos_token_ids=ends,
        tokens=vocabulary.tokens,
    )


def asked(directory: Path, questions: Iterable[str]) -> list[list[int]]:
    """Each question as a user's message in the model's chat template, up to where the answer begins. Empty if the model
    has no such template, or one that cannot be used."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        messages = [[{"role": "user", "content": question}] for question in questions]
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return [list(ids) for ids in encoded["input_ids"]]
    except Exception as error:  # a template is a program, which fails in any way
        log.info("no chat template asks questions", extra={"reason": in_words(error)})
        return []


def _drawable(directory: Path, config: PreTrainedConfig, num_rows: int) -> tuple[int, Vocabulary, tuple[int, ...]]:
    """Of a model with ``num_rows`` logits: how many tokens can be drawn, which these are if that is known, and which of
    them end a text."""
    vocabulary = Vocabulary(())
    if (directory / files.TOKENIZER).is_file():
        vocabulary = read_vocabulary(directory / files.TOKENIZER)
        # Rows beyond the tokenizer's ids are padding, and ids beyond the rows cannot be drawn. Both differ between
        # models of one family.
        num_rows = min(num_rows, len(vocabulary))
        vocabulary = vocabulary.below(num_rows)
    return num_rows, vocabulary, _eos_token_ids(directory, config, num_rows)


def _config(directory: Path) -> PreTrainedConfig:
    """The configuration as transformers reads it. Raises ValueError if it cannot be used."""
    if (directory / files.ADAPTER).is_file():
        raise ValueError(f"this is an adapter ({files.ADAPTER}); merge it into its base model")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json")
    config: PreTrainedConfig = _read(
        directory, "config.json", lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
    )
    return config


def _refuse_quantised(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        if quantisation := getattr(part, "quantization_config", None):
            raise ValueError(weights.refusal(_method(quantisation)))


def _read(directory: Path, name: str, read: Callable[[], T]) -> T:
    """What a library makes of the file ``name``. Raises ValueError that names it, whatever the library raises."""
    files.refuse_pointer(directory / name)
    try:
        return read()
    except Exception as error:  # each library has its own, and a value may break any of them
        raise ValueError(f"its {name} cannot be used: {in_words(error)}") from error


def _method(quantisation: Any) -> str:
    known = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    in_bits = next((f"bitsandbytes, {bits} bits" for bits in (4, 8) if known.get(f"load_in_{bits}bit")), "")
    return str(in_bits or known.get("quant_method") or "quantization_config")


def _digest(directory: Path, names: list[str], facts: dict[str, Any]) -> str:
    """The digest of all inputs that affect the output: the content of files, and ``facts`` that are not in them."""
    # Hashing releases the interpreter lock, and a large model has many files.
    with ThreadPoolExecutor(_HASHING_THREADS, "hashing") as hashing:
        hashes = dict(zip(names, hashing.map(file_hash, (directory / name for name in names)), strict=True))
    known = {"version": _DIGEST_VERSION, "sampling": SAMPLING_VERSION, **facts, "files": hashes}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_dtype(config: PreTrainedConfig) -> str:
    dtype = str(config.dtype or "").removeprefix("torch.")
    if dtype not in ("", *weights.DTYPES.values()):
        raise ValueError(f"the checkpoint's weights are {dtype}; choose float32, bfloat16 or float16")
    return dtype


def _positive(config: PreTrainedConfig, *names: str) -> int:
    """The first of these that the configuration has."""
    for name in names:
        if isinstance(number := getattr(config, name, None), int):
            if number < 1:
                raise ValueError(f"its config.json cannot be used: {name} is {number}")
            return number
    raise ValueError(f"its config.json cannot be used: it has no {names[0]}")


def _context_length(config: PreTrainedConfig) -> int:
    length = _positive(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return int(min(length, _same_positions(config)))


def _same_positions(config: PreTrainedConfig) -> float:
    """The number of positions with one encoding. Beyond it, "longrope" encodes all positions of a pass differently: a
    row would depend on the other rows of its pass, and cached keys would be wrong."""
    rope = getattr(config, "rope_parameters", None) or {}  # of all layers, or by the type of a layer
    ropes = [of_layers for of_layers in rope.values() if isinstance(of_layers, dict)] or [rope]
    return min(
        (rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"),
        default=math.inf,
    )


def _eos_token_ids(directory: Path, config: PreTrainedConfig, vocab_size: int) -> tuple[int, ...]:
    """The end tokens that can be drawn. Warns of others, which would never end a text, and if there are none."""
    named = next((ids for ids in _named_ends(directory, config) if ids), [])
    usable = tuple(dict.fromkeys(token for token in named if type(token) is int and token in range(vocab_size)))
    if unusable := [token for token in named if token not in usable]:
        log.warning("end tokens outside the vocabulary are left out", extra={"left_out": unusable, "kept": usable})
    if not usable:
        log.warning("no end token is known: texts end at max_tokens, at a stop token or at a stop string only")
    return usable


def _named_ends(directory: Path, config: PreTrainedConfig) -> Iterator[list[int]]:
    """The end tokens by each source, the one that transformers asks first."""
    if (directory / "generation_config.json").is_file():
        generation = _read(directory, "generation_config.json", lambda: GenerationConfig.from_pretrained(directory))
        yield _ids(generation.eos_token_id)
    for part in (config, config.get_text_config()):
        yield _ids(getattr(part, "eos_token_id", None))
    if (directory / "tokenizer_config.json").is_file() and (directory / files.TOKENIZER).is_file():
        read = PreTrainedTokenizerFast.from_pretrained
        yield _ids(_read(directory, "tokenizer_config.json", lambda: read(directory)).eos_token_id)


def _ids(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else eos if isinstance(eos, list) else [eos]
