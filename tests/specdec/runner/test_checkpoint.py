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
from specdec.runner.vocabulary import Vocabulary, read_tokenizer, read_vocabulary
from tests import checkout


def tokenizer(size: int, prefix: str = "t") -> Tokenizer:
    word_level = Tokenizer(models.WordLevel({f"{prefix}{i}": i for i in range(size)}, unk_token=f"{prefix}0"))
    word_level.decoder = decoders.Fuse()
    return word_level


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


def shard(directory: Path) -> None:
    """The same weights in several files with an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shards = {f"model-{number}-of-2.safetensors": sorted(weights)[number::2] for number in range(2)}
    for name, names in shards.items():
        save_file({name: weights[name] for name in names}, directory / name, {"format": "pt"})
    weight_map = {item: name for name, names in shards.items() for item in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def find(directory: Path, dtype: str = "float32"):
    return Checkpoint.find(str(directory), dtype).info


def test_a_checkpoint_is_described_wherever_it_is(original, directory):
    info = find(directory)
    assert (info.name, info.context_length, info.dtype, info.vocab_size) == ("tiny", 40, "float32", 29)
    assert info.eos_token_ids == (2, 5)
    assert info.tokenizer_fingerprint == Vocabulary.of(tokenizer(29)).fingerprint
    assert info.tokens == tuple(b"t%d" % index for index in range(29))
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


def test_the_weights_are_the_files_that_transformers_takes_and_no_other(directory):
    """Some checkpoints have a second copy of all weights, for other programs."""
    whole = find(directory).model_digest
    save_file({"extra": torch.zeros(1)}, directory / "consolidated.safetensors")
    assert find(directory).model_digest == whole
    shard(directory)
    sharded = find(directory).model_digest
    (directory / "consolidated.safetensors").unlink()
    assert find(directory).model_digest == sharded != whole
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    for file in shards:
        weights = load_file(file)
        save_file({name: 2 * weight for name, weight in weights.items()}, file, metadata={"format": "pt"})
        assert find(directory).model_digest != sharded
        save_file(weights, file, metadata={"format": "pt"})


def test_files_are_hashed_side_by_side(directory, monkeypatch):
    """140 GB take minutes in one thread, before every load."""
    shard(directory)
    expected = find(directory).model_digest
    together = threading.Barrier(1 + len(list(directory.glob("*.safetensors"))), timeout=10)
    digest = hashlib.file_digest

    def waits(*arguments):
        together.wait()
        return digest(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", waits)
    assert find(directory).model_digest == expected


def test_the_end_tokens_are_those_of_the_first_that_names_any(directory, caplog):
    """Generation config, config, the text model's config, tokenizer."""
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t4"}))
    rewrite(directory / "generation_config.json", eos_token_id=7)
    assert find(directory).eos_token_ids == (7,)
    (directory / "generation_config.json").unlink()
    assert find(directory).eos_token_ids == (3,)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    assert find(directory).eos_token_ids == (3,)
    (directory / "config.json").write_text(json.dumps({**text, "eos_token_id": None}))
    assert find(directory).eos_token_ids == (4,)
    assert not caplog.records
    (directory / "tokenizer_config.json").unlink()
    assert find(directory).eos_token_ids == ()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no end token is known"]


@pytest.mark.parametrize(("named", "kept"), [([2, 29, -1, 2, 31], (2,)), (29, ()), (-1, ()), ([3.0, 4, "5"], (4,))])
def test_end_tokens_that_cannot_be_drawn_are_left_out_with_a_warning(directory, caplog, named, kept):
    """Every request names the end tokens to the target, which refuses ids outside the vocabulary."""
    rewrite(directory / "generation_config.json", eos_token_id=named)
    assert find(directory).eos_token_ids == kept
    record = caplog.records[0]
    assert "outside the vocabulary" in record.message
    assert record.left_out == [item for item in (named if isinstance(named, list) else [named]) if item not in kept]
    assert len(caplog.records) == (1 if kept else 2)


def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(directory):
    (directory / "tokenizer.json").unlink()
    rewrite(directory / "config.json", max_position_embeddings=..., vocab_size=...)
    assert (find(directory).context_length, find(directory).vocab_size) == (2048, 32000)
    text = dict(hidden_size=16, num_hidden_layers=1)
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert (find(directory).context_length, find(directory).vocab_size) == (131072, 262208)


def test_a_text_model_may_be_part_of_a_larger_one(directory):
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    assert (find(directory).vocab_size, find(directory).context_length) == (29, 40)
    (directory / "tokenizer.json").unlink()
    assert (find(directory).vocab_size, find(directory).tokenizer_fingerprint) == (32, "")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/directory", "there is no such directory"),
        ("./none", "there is no such directory"),
        (__file__, "this is a file; a model is the directory"),
        ("no such/id", "this is neither a directory nor a checkpoint that the hub can give"),
    ],
)
def test_an_unknown_name_is_a_sentence(model, words):
    with pytest.raises(ValueError, match=words):
        Checkpoint.find(model, "float32")


QUANTISED = {
    "awq": dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
    "gptq": dict(quant_method="gptq", bits=4, group_size=128),
    "bitsandbytes, 4 bits": dict(quant_method="bitsandbytes", load_in_4bit=True),
    "bitsandbytes, 8 bits": dict(load_in_8bit=True),
    "compressed-tensors": dict(quant_method="compressed-tensors", format="pack-quantized", config_groups={}),
    "fp8": dict(quant_method="fp8", weight_block_size=[128, 128]),
    "mxfp4": dict(quant_method="mxfp4"),
    "of tomorrow": dict(quant_method="of tomorrow"),
    "quantization_config": dict(bits=3),
}


@pytest.mark.parametrize("part", ["all of it", "its text model"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_refused_by_their_kind(directory, kind, part):
    if part == "its text model":
        text = json.loads((directory / "config.json").read_text())
        text["quantization_config"] = QUANTISED[kind]
        (directory / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    else:
        rewrite(directory / "config.json", quantization_config=QUANTISED[kind])
    with pytest.raises(ValueError, match=rf"its weights are quantised \({kind}\), and this engine takes plain weights"):
        find(directory)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_weights_are_refused_whatever_the_config_says(directory, dtype):
    """They would be taken for plain numbers, without their scales."""
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"quantised \(such as model.layers.0.mlp.up_proj.weight in (F8_E4M3|I8|U8)\)"):
        find(directory)


def test_a_directory_of_an_adapter_is_refused(directory):
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"this is an adapter \(adapter_config.json\); merge it"):
        find(directory)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(directory, name):
    (directory / name).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"/{name} is a Git LFS pointer.*git lfs pull"):
        find(directory)


def test_a_shard_that_is_a_pointer_of_git_lfs_is_named(directory):
    shard(directory)
    (directory / "model-1-of-2.safetensors").write_text(POINTER)
    with pytest.raises(ValueError, match=r"/model-1-of-2.safetensors is a Git LFS pointer"):
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


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_context_ends_where_all_positions_would_be_encoded_anew(directory, name, key):
    """Phi-3 takes all three names for the same encoding."""
    rope = LONG | {"rope_type" if key == "rope_parameters" else "type": name}
    phi3 = dict(model_type="phi3", pad_token_id=0, rope_parameters=..., original_max_position_embeddings=16)
    rewrite(directory / "config.json", **phi3 | {key: rope | {"original_max_position_embeddings": 16}})
    assert find(directory).context_length == 16
    if name != "su":  # which transformers takes only with the length in its own place
        rewrite(directory / "config.json", **phi3 | {key: rope})
        assert find(directory).context_length == 16


def test_a_context_ends_where_positions_of_one_type_of_layers_would_be_encoded_anew(directory):
    layers = ["sliding_attention", "full_attention"]
    ropes = {layers[0]: {"rope_type": "default"}, layers[1]: LONG | {"rope_type": "longrope"}}
    ropes[layers[1]] |= {"original_max_position_embeddings": 24, "factor": 2.0}
    text = dict(model_type="gemma3_text", num_hidden_layers=2, layer_types=layers, rope_parameters=ropes, head_dim=8)
    rewrite(directory / "config.json", **text)
    assert find(directory).context_length == 24


@pytest.mark.parametrize("name", ["llama3", "yarn", "dynamic", "linear"])
def test_other_encodings_keep_the_whole_context(directory, name):
    rope = {"rope_type": name, "factor": 2.0, "original_max_position_embeddings": 16}
    rewrite(directory / "config.json", rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    assert find(directory).context_length == 40


def test_a_vocabulary_is_the_pairs_of_id_and_token_up_to_the_largest_id(tmp_path):
    swapped = Tokenizer(models.WordLevel({"t0": 0, "t2": 1, "t1": 2}, unk_token="t0"))
    different = [tokenizer(5), tokenizer(6), tokenizer(5, "u"), tokenizer(3), swapped]
    assert len({Vocabulary.of(item).fingerprint for item in different}) == 5
    tokenizer(5).save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path / "tokenizer.json") == Vocabulary.of(tokenizer(5))
    added = tokenizer(5)
    added.add_special_tokens(["<end>"])
    assert len(Vocabulary.of(added)) == 6
    assert len(Vocabulary.of(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))) == 8


def test_ids_that_the_model_cannot_draw_are_no_part_of_its_vocabulary(directory):
    """A fine-tune may bring a pad token of its own, for which the model has no row."""
    tokenizer(32).save(str(directory / "tokenizer.json"))
    original = find(directory)
    for name in ("<pad>", "<fill>"):
        more = tokenizer(32)
        more.add_special_tokens([name])
        more.save(str(directory / "tokenizer.json"))
        assert find(directory) == original
    tokenizer(31).save(str(directory / "tokenizer.json"))
    assert find(directory).tokenizer_fingerprint != original.tokenizer_fingerprint


def test_a_tokenizer_is_the_models_and_not_its_authors_last_call(tmp_path):
    text = "def f(argument): return argument\n" * 20
    left = Tokenizer.from_file(str(checkout.TOKENIZER))
    expected = left.encode(text).ids
    left.enable_truncation(8)
    left.enable_padding(length=16)
    left.model.dropout = 0.9
    left.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == expected
    left.enable_truncation(500)
    left.enable_padding(length=500)
    left.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == expected
