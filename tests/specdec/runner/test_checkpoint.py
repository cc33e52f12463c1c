"""What identifies a checkpoint, and what is said when it is not one."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from specdec.runner import checkpoint
from specdec.runner.checkpoint import Checkpoint
from specdec.runner.vocabulary import Vocabulary, read_vocabulary


def tokenizer(size: int, prefix: str = "t") -> Tokenizer:
    made = Tokenizer(models.WordLevel({f"{prefix}{i}": i for i in range(size)}, unk_token=f"{prefix}0"))
    made.decoder = decoders.Fuse()
    return made


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=32,  # padded: the tokenizer has 29
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        eos_token_id=3,
    )
    model = hf.LlamaForCausalLM(config)
    model.generation_config = hf.GenerationConfig(eos_token_id=[2, 5])
    model.save_pretrained(directory)
    tokenizer(29).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def directory(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def rewrite(file: Path, **changes) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def find(directory: Path, dtype: str = "float32"):
    return Checkpoint.find(str(directory), dtype).info


def test_a_checkpoint_is_described(directory):
    info = find(directory)
    assert info.name == "tiny"
    assert info.context_length == 40
    assert info.dtype == "float32"
    assert info.eos_token_ids == (2, 5)
    assert info.vocab_size == 29
    assert info.tokenizer_fingerprint == Vocabulary.of(tokenizer(29)).fingerprint
    assert len(info.model_digest) == 64


def test_the_digest_is_that_of_the_files_and_not_of_the_place(original, directory):
    assert find(original).model_digest == find(directory).model_digest


def test_the_digest_changes_with_weights_dtype_and_config(directory):
    digests = {find(directory).model_digest, find(directory, "bfloat16").model_digest}
    weights = load_file(directory / "model.safetensors")
    # One number of one tensor.
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    digests.add(find(directory).model_digest)
    rewrite(directory / "config.json", rms_norm_eps=1e-5)
    digests.add(find(directory).model_digest)
    save_file({"extra": torch.zeros(1)}, directory / "model-2.safetensors")
    digests.add(find(directory).model_digest)
    assert len(digests) == 5


def test_the_digest_changes_with_what_may_be_drawn_and_where_a_text_ends(directory):
    """Replicas with one digest finish each other's texts; with another tokenizer they would draw from fewer tokens."""
    digests = {find(directory).model_digest}
    for change in (
        lambda: tokenizer(28).save(str(directory / "tokenizer.json")),
        lambda: tokenizer(28, "u").save(str(directory / "tokenizer.json")),
        lambda: (directory / "tokenizer.json").unlink(),
        lambda: rewrite(directory / "generation_config.json", eos_token_id=7),
    ):
        change()
        digests.add(find(directory).model_digest)
    assert len(digests) == 5
    rewrite(directory / "generation_config.json", temperature=0.5)  # which nobody here reads
    assert find(directory).model_digest in digests


def test_files_are_hashed_side_by_side(directory, monkeypatch):
    """140 GB take minutes in one thread, before every load."""
    save_file({"extra": torch.zeros(1)}, directory / "model-2.safetensors")
    together = threading.Barrier(3, timeout=10)
    hash_of = checkpoint._file_hash

    def waits(file: Path) -> str:
        together.wait()
        return hash_of(file)

    expected = find(directory).model_digest
    monkeypatch.setattr(checkpoint, "_file_hash", waits)
    assert find(directory).model_digest == expected


def test_the_end_tokens_are_those_of_the_generation_config_else_of_the_config(directory):
    rewrite(directory / "generation_config.json", eos_token_id=7)
    assert find(directory).eos_token_ids == (7,)
    (directory / "generation_config.json").unlink()
    assert find(directory).eos_token_ids == (3,)
    rewrite(directory / "config.json", eos_token_id=None)
    assert find(directory).eos_token_ids == ()


def test_without_a_tokenizer_every_row_is_usable_and_nothing_is_fingerprinted(directory):
    (directory / "tokenizer.json").unlink()
    info = find(directory)
    assert (info.vocab_size, info.tokenizer_fingerprint) == (32, "")


def test_the_text_part_of_a_larger_model_says_vocabulary_and_context(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "larger", "text_config": config}))
    assert (find(directory).vocab_size, find(directory).context_length) == (29, 40)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_a_sentence(directory, missing):
    (directory / missing).unlink()
    with pytest.raises(ValueError, match=r"has no config.json with \*.safetensors beside it"):
        find(directory)


def test_a_name_that_is_nothing_is_a_sentence():
    with pytest.raises(ValueError, match=r"neither a directory nor a checkpoint the hub can give") as caught:
        Checkpoint.find("/no/such/directory", "float32")
    assert "/no/such/directory" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(max_position_embeddings=...), "how long the model's context is"),
        (dict(vocab_size=...), "vocab_size"),
    ],
)
def test_a_config_that_says_too_little_is_a_sentence(directory, changes, words):
    rewrite(directory / "config.json", **changes)
    with pytest.raises(ValueError, match=words):
        find(directory)


def test_dtype_auto_is_the_checkpoints_own(directory):
    for name, written in (("dtype", "bfloat16"), ("torch_dtype", "float16")):
        rewrite(directory / "config.json", **{"dtype": ..., "torch_dtype": ..., name: written})
        assert Checkpoint.find(str(directory), "auto").dtype == written
        assert find(directory, "auto") == find(directory, written)
    rewrite(directory / "config.json", dtype=..., torch_dtype=...)
    assert find(directory, "auto").dtype == "float32"
    rewrite(directory / "config.json", dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="weights are float8_e4m3fn; choose"):
        find(directory, "auto")


def test_a_context_ends_where_all_positions_would_be_encoded_anew(directory):
    rewrite(directory / "config.json", rope_parameters={"rope_type": "llama3", "original_max_position_embeddings": 16})
    assert find(directory).context_length == 40
    rewrite(
        directory / "config.json", rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 16}
    )
    assert find(directory).context_length == 16
    older = dict(rope_parameters=..., rope_scaling={"type": "longrope"}, original_max_position_embeddings=24)
    rewrite(directory / "config.json", **older)
    assert find(directory).context_length == 24


def test_a_config_that_is_no_json_is_a_sentence(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json"):
        find(directory)


def test_the_fingerprint_is_of_the_pairs_of_id_and_token(tmp_path):
    assert Vocabulary.of(tokenizer(5)) == Vocabulary.of(tokenizer(5))
    assert Vocabulary.of(tokenizer(5)).fingerprint != Vocabulary.of(tokenizer(6)).fingerprint
    assert Vocabulary.of(tokenizer(5)).fingerprint != Vocabulary.of(tokenizer(5, "u")).fingerprint
    swapped = Tokenizer(models.WordLevel({"t0": 0, "t2": 1, "t1": 2}, unk_token="t0"))
    assert Vocabulary.of(swapped).fingerprint != Vocabulary.of(tokenizer(3)).fingerprint
    tokenizer(5).save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path / "tokenizer.json") == Vocabulary.of(tokenizer(5))


def test_the_size_counts_ids_up_to_the_largest_added_tokens_included():
    made = tokenizer(5)
    made.add_special_tokens(["<end>"])
    assert Vocabulary.of(made).size == 6
    gap = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Vocabulary.of(gap).size == 8
