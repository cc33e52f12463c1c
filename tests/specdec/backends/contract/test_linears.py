"""A packed linear layer computes what the plain one does, and a row's bits depend on the row alone."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers as hf

from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.linears import replace_linears
from specdec.backends.torch import onednn_linear
from specdec.backends.torch.onednn_linear import PackedLinear, can_pack, min_rows, pack_linears, row_multiple
from tests.models.backends import AVX512_ONLY, BACKENDS, backend

ROWS = (*range(2, 71), 96, 128, 255, 256, 257, 512)
SHAPES = ((2816, 1024), (1024, 2816), (864, 320), (1000, 200), (96, 192), (130, 4100), (33, 17))  # out, in
SHAPE = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this torch or this CPU packs no bfloat16 weights"
)


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
TAKES_TILES = TiledLinear.takes(torch.zeros(2, 2, dtype=BFLOAT16))
tiled = pytest.param(TiledLinear, BFLOAT16, id="tiled", marks=AVX512_ONLY)
KINDS = [
    tiled,
    pytest.param(PackedLinear, BFLOAT16, id="oneDNN bfloat16"),
    pytest.param(PackedLinear, FLOAT32, id="oneDNN float32"),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(shape[0])
    return torch.nn.Linear(shape[1], shape[0], bias=bias).to(dtype)


def packed(linear: torch.nn.Linear, kind: type = PackedLinear) -> PackedLinear | TiledLinear:
    if kind is TiledLinear and not TiledLinear.takes(linear.weight):
        pytest.skip("an odd number of inputs")
    return kind(linear.weight, linear.bias)


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("shape", "threads"),
    [*((shape, 2) for shape in (SHAPES[0], *SHAPES[3:])), (SHAPES[0], 1), (SHAPES[-2], 1)],
    indirect=["threads"],
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows_or_its_place(shape, kind, dtype):
    layer = packed(random_linear(shape, dtype), kind)
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
def test_bits_of_plain_float32_rows_depend_on_their_number(threads):
    """Therefore passes have at least four rows where nothing can be packed."""
    linear, rows = random_linear((1024, 2816), torch.float32), torch.randn(12, 2816)
    expected = linear(rows)
    different = [count for count in range(1, 13) if not torch.equal(linear(rows[:count]), expected[:count])]
    if not different:
        pytest.skip("not on this CPU")
    assert not any(count % 4 == 0 for count in different)


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("shape", "bias"), [*((shape, True) for shape in SHAPES), (SHAPES[2], False), (SHAPES[-1], False)], ids=str
)
def test_it_computes_what_the_plain_layer_computes(shape, bias, kind, dtype):
    plain = random_linear(shape, dtype, bias)
    inputs = torch.randn(3, 19, shape[1]).to(dtype)
    exact = torch.nn.functional.linear(*(t.double() for t in (inputs, *plain.parameters())))
    outputs = packed(plain, kind)(inputs)
    error = (outputs.double() - exact).abs()
    # Half of the last of eight bits, and what sums of a thousand products in float32 are off by.
    assert (error <= exact.abs() / (256 if dtype is BFLOAT16 else 1e5) + (1e-5 if dtype is BFLOAT16 else 2e-5)).all()
    assert kind is TiledLinear or dtype is FLOAT32 or torch.equal(outputs, plain(inputs))


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_nothing_of_an_unsound_row_reaches_another(kind, dtype):
    layer = packed(random_linear((100, 64), dtype), kind)
    rows = torch.randn(8, 64).to(dtype)
    expected = layer(rows)
    rows[3, 5] = torch.nan
    got = layer(rows)
    assert got[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[others], expected[others])


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_packed_layer_shows_its_weight_and_takes_no_rows(kind, dtype):
    linear = random_linear((33, 18), dtype)
    layer = packed(linear, kind)
    assert layer(torch.zeros(0, 5, 18, dtype=dtype)).shape == (0, 5, 33)
    assert torch.equal(layer.weight, linear.weight)
    assert (layer.in_features, layer.out_features) == (18, 33)
    assert layer.nbytes == (64 if kind is TiledLinear else 33) * 18 * dtype.itemsize, "the last tile is filled up"


CONFIGS = {
    "llama": hf.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama-tied": hf.LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma2": hf.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "qwen2-bias": hf.Qwen2Config(**SHAPE, num_key_value_heads=2),
    "gpt2-conv1d": hf.GPT2Config(
        vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}


def take(name: str, model: torch.nn.Module) -> None:
    """Replace its linear layers as this backend does."""
    if name == "avx512":
        replace_linears(model, TiledLinear, TiledLinear.takes)
    pack_linears(model)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_whole_model_is_packed_and_keeps_its_logits(config, name, dtype):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[config], dtype=dtype).eval()
    plain = copy.deepcopy(model)
    take(name, model)
    left = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, hf.pytorch_utils.Conv1D))]
    assert not left
    assert type(model.lm_head) is (TiledLinear if name == "avx512" and dtype is BFLOAT16 else PackedLinear)
    assert model.dtype == dtype
    ids = torch.arange(11)[None]
    for keep in (0, 2, torch.tensor([1, 4, 4])):
        got, expected = (computed(ids, logits_to_keep=keep).logits for computed in (model, plain))
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_a_packed_weight_is_freed_but_a_tied_embedding_stays(name):
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["llama-tied"], dtype=torch.bfloat16)
    freed = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    tied = model.model.embed_tokens.weight
    assert tied is model.lm_head.weight
    take(name, model)
    gc.collect()
    assert freed() is None
    assert model.model.embed_tokens.weight is tied
    assert torch.equal(model.lm_head.weight, tied)


class Scaled(torch.nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Renamed(torch.nn.Linear):
    pass


def test_a_layer_that_computes_something_else_or_cannot_be_packed_is_left_alone(monkeypatch):
    layers = [Scaled(4, 4), Renamed(4, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4).half()]
    model = torch.nn.Sequential(*layers)
    pack_linears(model)
    assert [type(layer) for layer in model] == [Scaled, PackedLinear, PackedLinear, torch.nn.LayerNorm, torch.nn.Linear]
    assert list(backend("torch").report(model).values()) == [2, 1]  # by oneDNN, by torch
    packable = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with monkeypatch.context() as patched:
        patched.setattr(onednn_linear, "can_pack", lambda weight: False)
        pack_linears(packable)
        assert type(packable[0]) is torch.nn.Linear
        assert (row_multiple(packable), min_rows(packable)) == (4, 1), "passes are padded further"
    pack_linears(packable)
    assert row_multiple(packable) == 2
    assert min_rows(packable) == (4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1)
    assert not can_pack(torch.zeros(2, 2, device="meta"))


@AVX512_ONLY
def test_rows_of_another_width_are_refused_before_memory_is_read():
    layer = TiledLinear(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    with pytest.raises(ValueError, match="rows of 128 numbers, where the weight takes 64"):
        layer(torch.zeros(1, 128, dtype=torch.bfloat16))
