"""What identifies a checkpoint, and the sentence for a directory that is none."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

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


def test_a_checkpoint_is_described_wherever_it_is(original, directory):
    info = find(directory)
    assert (info.name, info.context_length, info.dtype, info.vocab_size) == ("tiny", 40, "float32", 29)
    assert info.eos_token_ids == (2, 5)
    assert info.tokenizer_fingerprint == Vocabulary.of(tokenizer(29)).fingerprint
    assert len(info.model_digest) == 64
    assert info == find(original)


def test_the_digest_changes_with_all_that_decides_the_text(directory):
    """Replicas with one digest finish each other's texts: with another tokenizer they would draw from fewer tokens."""
    digests = [find(directory).model_digest, find(directory, "bfloat16").model_digest]
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3  # one number of one tensor
    for change in (
        lambda: save_file(weights, directory / "model.safetensors", metadata={"format": "pt"}),
        lambda: rewrite(directory / "config.json", rms_norm_eps=1e-5),
        lambda: save_file({"extra": torch.zeros(1)}, directory / "model-2.safetensors"),
        lambda: tokenizer(28).save(str(directory / "tokenizer.json")),
        lambda: tokenizer(28, "u").save(str(directory / "tokenizer.json")),
        lambda: (directory / "tokenizer.json").unlink(),
        lambda: rewrite(directory / "generation_config.json", eos_token_id=7),
    ):
        change()
        digests.append(find(directory).model_digest)
    assert len(set(digests)) == len(digests)
    rewrite(directory / "generation_config.json", temperature=0.5)  # which is not read here
    assert find(directory).model_digest == digests[-1]


def test_files_are_hashed_side_by_side(directory, monkeypatch):
    """140 GB take minutes in one thread, before every load."""
    save_file({"extra": torch.zeros(1)}, directory / "model-2.safetensors")
    together = threading.Barrier(3, timeout=10)
    digest = hashlib.file_digest

    def waits(*arguments):
        together.wait()
        return digest(*arguments)

    expected = find(directory).model_digest
    monkeypatch.setattr(hashlib, "file_digest", waits)
    assert find(directory).model_digest == expected


def test_the_end_tokens_are_those_of_the_generation_config_else_of_the_config(directory):
    rewrite(directory / "generation_config.json", eos_token_id=7)
    assert find(directory).eos_token_ids == (7,)
    (directory / "generation_config.json").unlink()
    assert find(directory).eos_token_ids == (3,)
    rewrite(directory / "config.json", eos_token_id=None)
    assert find(directory).eos_token_ids == ()


def test_a_vocabulary_without_a_tokenizer_is_the_configs_which_may_be_part_of_a_larger_model(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "larger", "text_config": config}))
    assert (find(directory).vocab_size, find(directory).context_length) == (29, 40)
    (directory / "tokenizer.json").unlink()
    assert (find(directory).vocab_size, find(directory).tokenizer_fingerprint) == (32, "")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_a_sentence(directory, missing):
    (directory / missing).unlink()
    with pytest.raises(ValueError, match=r"has no config.json with \*.safetensors beside it"):
        find(directory)


def test_an_unknown_name_is_a_sentence():
    with pytest.raises(
        ValueError, match=r"/no/such/directory is neither a directory nor a checkpoint the hub can give"
    ):
        find(Path("/no/such/directory"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(max_position_embeddings=...), "how long the model's context is"),
        (dict(vocab_size=...), "vocab_size"),
        (None, r"config.json"),
    ],
)
def test_a_config_that_is_no_json_or_says_too_little_is_a_sentence(directory, changes, words):
    if changes:
        rewrite(directory / "config.json", **changes)
    else:
        (directory / "config.json").write_text("{")
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


def test_a_vocabulary_is_the_pairs_of_id_and_token_up_to_the_largest_id(tmp_path):
    swapped = Tokenizer(models.WordLevel({"t0": 0, "t2": 1, "t1": 2}, unk_token="t0"))
    different = [tokenizer(5), tokenizer(6), tokenizer(5, "u"), tokenizer(3), swapped]
    assert len({Vocabulary.of(each).fingerprint for each in different}) == 5
    tokenizer(5).save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path / "tokenizer.json") == Vocabulary.of(tokenizer(5))
    added = tokenizer(5)
    added.add_special_tokens(["<end>"])
    assert Vocabulary.of(added).size == 6
    assert Vocabulary.of(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))).size == 8
