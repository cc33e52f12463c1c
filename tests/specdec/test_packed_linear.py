"""A packed linear layer computes what the plain one does, and a row's bits are its own."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers as hf

from specdec import packed_linear
from specdec.packed_linear import PackedLinear, can_pack, least_rows, pack_linears, row_multiple

ROWS = (*range(2, 71), 96, 128, 255, 256, 257, 512)
SHAPES = ((2816, 1024), (1024, 2816), (864, 320), (1000, 200), (96, 192), (33, 17))  # out, in
SHAPE = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this torch or this CPU packs no bfloat16 weights"
)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(shape[0])
    return torch.nn.Linear(shape[1], shape[0], bias=bias).to(dtype)


def packed(linear: torch.nn.Linear) -> PackedLinear:
    return PackedLinear(linear.weight, linear.bias)


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows_or_its_place(shape, dtype):
    layer = packed(random_linear(shape, dtype))
    rows = torch.randn(max(ROWS), shape[1]).to(dtype)
    expected = layer(rows[:9])
    for num_rows in ROWS:
        assert torch.equal(layer(rows[:num_rows])[:9], expected[:num_rows]), num_rows
    for row in range(9):
        assert torch.equal(layer(rows[row : row + 1])[0], expected[row])
        assert torch.equal(layer(rows[None, None, row : row + 1])[0, 0, 0], expected[row])
    moved = torch.cat([rows[100:113], rows[:9], rows[200:208]])
    assert torch.equal(layer(moved)[13:22], expected)
    assert torch.equal(layer(rows[:9].t().contiguous().t()), expected)


@torch.inference_mode()
def test_plain_float32_rows_are_not_like_that(threads):
    """Else there were no need for a floor of four rows where nothing can be packed."""
    linear, rows = random_linear((1024, 2816), torch.float32), torch.randn(12, 2816)
    expected = linear(rows)
    different = [count for count in range(1, 13) if not torch.equal(linear(rows[:count]), expected[:count])]
    if not different:
        pytest.skip("they are on this CPU")
    assert not any(count % 4 == 0 for count in different)


@torch.inference_mode()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_the_plain_layer_computes(shape, bias):
    inputs = torch.randn(3, 5, shape[1])
    plain = random_linear(shape, torch.float32, bias)
    torch.testing.assert_close(packed(plain)(inputs), plain(inputs), atol=2e-5, rtol=1e-5)
    plain = plain.bfloat16()
    assert torch.equal(packed(plain)(inputs.bfloat16()), plain(inputs.bfloat16()))
    assert packed(plain)(inputs[:0].bfloat16()).shape == (0, 5, shape[0])


def test_the_weight_can_still_be_looked_at():
    linear = random_linear((33, 17), torch.bfloat16)
    layer = packed(linear)
    assert torch.equal(layer.weight, linear.weight)
    assert (layer.nbytes, layer.in_features, layer.out_features) == (33 * 17 * 2, 17, 33)


CONFIGS = {
    "llama": hf.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama-tied": hf.LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma2": hf.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "qwen2-bias": hf.Qwen2Config(**SHAPE, num_key_value_heads=2),
    "gpt2-conv1d": hf.GPT2Config(
        vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}


@torch.inference_mode()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_model_is_packed_and_keeps_its_logits(name, dtype):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    plain = copy.deepcopy(model)
    pack_linears(model)
    left = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, hf.pytorch_utils.Conv1D))]
    assert not left
    assert isinstance(model.lm_head, PackedLinear)
    assert model.dtype == dtype
    ids = torch.arange(11)[None]
    for keep in (0, 2, torch.tensor([1, 4, 4])):
        got, expected = (each(ids, logits_to_keep=keep).logits for each in (model, plain))
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=1e-5)


def test_a_packed_weight_is_freed_but_a_tied_embedding_stays():
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["llama-tied"], dtype=torch.bfloat16)
    freed = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    tied = model.model.embed_tokens.weight
    assert tied is model.lm_head.weight
    pack_linears(model)
    gc.collect()
    assert freed() is None
    assert model.model.embed_tokens.weight is tied
    assert torch.equal(model.lm_head.weight, tied)


class Scaled(torch.nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Renamed(torch.nn.Linear):
    pass


def test_a_layer_that_computes_something_else_is_left_alone():
    model = torch.nn.Sequential(Scaled(4, 4), Renamed(4, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    pack_linears(model)
    assert [type(layer) for layer in model] == [Scaled, PackedLinear, PackedLinear, torch.nn.LayerNorm]


def test_what_cannot_be_packed_stays_plain_and_its_passes_are_padded_further(monkeypatch):
    half = torch.nn.Sequential(torch.nn.Linear(4, 4).half())
    pack_linears(half)
    assert type(half[0]) is torch.nn.Linear
    monkeypatch.setattr(packed_linear, "can_pack", lambda weight: False)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    pack_linears(plain)
    assert type(plain[0]) is torch.nn.Linear
    assert row_multiple(plain) == 4
    assert row_multiple(plain.bfloat16()) == 2
    assert least_rows(plain) == 1
    monkeypatch.undo()
    packable = torch.nn.Sequential(torch.nn.Linear(4, 4))
    pack_linears(packable)
    assert row_multiple(packable) == 2
    assert least_rows(packable) == (4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1)
    assert not can_pack(torch.zeros(2, 2, device="meta"))
