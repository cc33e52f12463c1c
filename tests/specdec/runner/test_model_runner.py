"""A packed pass computes what the plain model computes: several sequences, chunks, trees and rollback at once."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import transformers as hf

from specdec.backends.torch.backend import TorchBackend
from specdec.backends.torch.gathered_attention import COPIES, GatheredAttention
from specdec.core.rounds import ModelInfo
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, CONTEXT = 48, 64
_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
)
_GEMMA = dict(**_SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0)
_LAYERS = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama-gqa": hf.LlamaConfig(**_SHAPE, num_key_value_heads=2),
    "qwen3": hf.Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=8),
    "mistral-sliding": hf.MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=4),
    "gpt2": hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT),
    "gpt-neox": hf.GPTNeoXConfig(**_SHAPE),
    "gemma3": hf.Gemma3TextConfig(**_GEMMA, layer_types=_LAYERS),
    "gemma2-softcap": hf.Gemma2Config(
        **_GEMMA, layer_types=_LAYERS, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
}


def tiny_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Louder than the usual 0.02, so that attention matters and a wrong key shows.
            torch.nn.init.normal_(parameter, std=0.25)
    model.train(False)
    return model


def runner_of(model: torch.nn.Module, vocab_size: int = VOCAB, num_slots: int = 256) -> ModelRunner:
    return ModelRunner(copy.deepcopy(model), ModelInfo("tiny", "", vocab_size, "", CONTEXT), num_slots, backend())


class Plain:
    """The plain model, one text at a time, with transformers' own attention and masks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = copy.deepcopy(model)
        self._model.set_attn_implementation("eager")
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, text: tuple[int, ...]) -> torch.Tensor:  # [vocab]
        """After the last token of the text."""
        if text not in self._known:
            with torch.inference_mode():
                rows = self._model(torch.tensor([text])).logits[0]
            self._known.update({text[: length + 1]: rows[length] for length in range(len(text))})
        return self._known[text]


def segment_of(cache: SequenceCache, chunk: list[int], tree: list[tuple[int, int]], wanted=None) -> Segment:
    """A chunk that continues the cached text, then a tree of (parent, token) below its last row."""
    rows = len(chunk) + len(tree)
    num_context = len(cache)
    cache.take(rows)
    return Segment(
        token_ids=[*chunk, *(token for _, token in tree)],
        parents=[*range(-1, len(chunk) - 1), *(len(chunk) + parent for parent, _ in tree)],
        num_context=num_context,
        block_table=list(cache.block_table),
        logit_rows=range(rows) if wanted is None else wanted,
    )


def row_texts(text: list[int], segment: Segment) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(segment.token_ids, segment.parents, strict=True):
        texts.append((*(text if parent < 0 else texts[parent]), token))
    return texts


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_passes_agree_with_the_plain_model(name):
    model = tiny_model(name)
    runner, plain = runner_of(model), Plain(model)
    rng = random.Random(1)
    texts: list[list[int]] = [[], [], []]
    caches = [runner.new_cache() for _ in texts]
    num_rows = num_trees = num_rollbacks = 0
    for _ in range(14):
        chosen = [index for index in range(3) if rng.random() < 0.7 and len(texts[index]) < CONTEXT - 20]
        segments = []
        for index in chosen:
            chunk = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 9]))]
            tree: list[tuple[int, int]] = []
            for node in range(rng.choice([0, 0, 4, 7])):
                edge = (rng.randint(ROOT, node - 1), rng.randrange(VOCAB))
                tree.append(edge)
            num_trees += any(parent != node - 1 for node, (parent, _) in enumerate(tree))
            segments.append(segment_of(caches[index], chunk, tree))
        if not segments:
            continue
        results = runner.forward(segments)
        for index, segment, result in zip(chosen, segments, results, strict=True):
            logits = result.logits
            paths = row_texts(texts[index], segment)
            # Longest first: one plain pass gives every row on its path.
            for row in sorted(range(len(paths)), key=lambda row: -len(paths[row])):
                expected = plain.logits(paths[row])
                torch.testing.assert_close(logits[row], expected, atol=3e-5, rtol=1e-5)
                num_rows += 1
            # Commit a path: some row and its ancestors.
            row, kept = rng.randrange(len(paths)), []
            while row >= 0:
                kept.insert(0, row)
                row = segment.parents[row]
            runner.move(caches[index].keep(kept))
            texts[index].extend(segment.token_ids[row] for row in kept)
            if rng.random() < 0.3:
                length = rng.randrange(len(texts[index]) + 1)
                caches[index].truncate(length)
                del texts[index][length:]
                num_rollbacks += 1
        assert [len(cache) for cache in caches] == [len(text) for text in texts]
    assert num_rows > 100
    assert num_trees > 2
    assert num_rollbacks > 2
    for cache in caches:
        cache.release()
    assert runner.pool.num_used == 0


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_earlier_passes_are_seen_and_not_fed_again(name, exact):
    """A tree that grows by some nodes in every pass; then the text goes on along it, and what is below stays."""
    model = tiny_model(name)
    runner, plain = runner_of(model), Plain(model)
    rng = random.Random(2)
    cache, text, tree = runner.new_cache(), [3], EMPTY_TREE
    runner.forward([segment_of(cache, text, [])])
    cache.keep(range(1))
    num_seen = 0
    for _ in range(30):
        num_kept = len(tree)
        for _ in range(rng.randrange(1, 4)):
            tree = tree.merge(TokenTree((rng.randrange(VOCAB),), (ROOT,)).under(some_path(tree, rng)))
        new = range(num_kept, len(tree))
        if not new:
            continue
        cache.take(len(new))
        segment = Segment(
            tree.token_ids[num_kept:], tree.parents, len(cache), list(cache.block_table), new, exact=exact
        )
        [output] = runner.forward([segment])
        assert len(output.sound) == len(output.logits) == len(new)
        for node, logits in zip(new, output.logits, strict=True):
            path = tree.path(node)
            num_seen += sum(above < num_kept for above in path)
            expected = plain.logits((*text, *(tree.token_ids[above] for above in path)))
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
        if rng.random() < 0.4 and len(text) < CONTEXT - 20:
            path = tree.path(rng.randrange(len(tree)))
            text += [tree.token_ids[node] for node in path]
            tree, behind = tree.below(path[-1])
            runner.move(cache.keep(path, behind))
        else:
            cache.keep((), range(len(tree)))
    assert num_seen > 20
    cache.release()
    assert runner.pool.num_used == 0


def some_path(tree: TokenTree, rng: random.Random) -> list[int]:
    return [tree.token_ids[node] for node in tree.path(rng.randrange(-1, len(tree)))]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama-gqa")


def test_only_the_rows_asked_for_come_back_and_only_usable_tokens(llama):
    runner, plain = runner_of(llama, vocab_size=40), Plain(llama)
    text, other = [5, 6, 7, 8, 9], [3, 4]
    first = segment_of(runner.new_cache(), text, [], wanted=[1, 4])
    second = segment_of(runner.new_cache(), other, [], wanted=[])
    third = segment_of(runner.new_cache(), other, [], wanted=[0])
    one, none, three = (output.logits for output in runner.forward([first, second, third]))
    assert one.shape == (2, 40)
    assert none.shape == (0, 40)
    assert three.shape == (1, 40)
    for row, length in ((one[0], 2), (one[1], 5)):
        torch.testing.assert_close(row, plain.logits(tuple(text[:length]))[:40], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(three[0], plain.logits((3,))[:40], atol=3e-5, rtol=1e-5)


def test_a_pass_that_wants_no_logits_at_all_still_fills_the_cache(llama):
    runner, plain = runner_of(llama), Plain(llama)
    cache = runner.new_cache()
    [nothing] = runner.forward([segment_of(cache, [1, 2, 3], [], wanted=[])])
    assert len(nothing.logits) == 0
    cache.keep(range(3))
    logits = runner.forward([segment_of(cache, [4], [])])[0].logits
    torch.testing.assert_close(logits[0], plain.logits((1, 2, 3, 4)), atol=3e-5, rtol=1e-5)


def test_a_single_row_is_padded_without_touching_anybodys_slots(llama):
    runner = runner_of(llama)
    bystander, cache = runner.new_cache(), runner.new_cache()
    runner.forward([segment_of(bystander, [1, 2, 3], [])])
    bystander.keep(range(3))

    def slots() -> list[torch.Tensor]:
        tensors = [tensor for pair in runner._store._layers.values() for tensor in pair]
        return [tensor.flatten(0, 1).clone() for tensor in tensors]

    before = slots()
    runner.forward([segment_of(cache, [0], [])])
    [own] = cache.block_table
    for old, new in zip(before, slots(), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [own * runner.pool.block_size]


def test_the_company_of_a_row_does_not_change_it(llama):
    runner = runner_of(llama)
    [alone] = runner.forward([segment_of(runner.new_cache(), [7, 8, 9, 10], [])])
    packed = runner.forward([segment_of(runner.new_cache(), ids, []) for ids in ([1], [7, 8, 9, 10], [2] * 11)])
    assert torch.equal(packed[1].logits, alone.logits)


def test_twins_in_different_branches_see_their_own_ancestors_only(llama):
    runner, plain = runner_of(llama), Plain(llama)
    # The same token below two different nodes, and once at the root.
    segment = segment_of(runner.new_cache(), [1, 2], [(-1, 5), (-1, 6), (0, 9), (1, 9), (-1, 9)])
    logits = runner.forward([segment])[0].logits
    for row, text in enumerate([(1,), (1, 2), (1, 2, 5), (1, 2, 6), (1, 2, 5, 9), (1, 2, 6, 9), (1, 2, 9)]):
        torch.testing.assert_close(logits[row], plain.logits(text), atol=3e-5, rtol=1e-5)
    assert not torch.allclose(logits[4], logits[5], atol=1e-2)


def test_what_is_gathered_at_a_time_is_bounded_by_the_pool_however_many_share_a_text(llama, monkeypatch):
    """Each reads the text for itself, and specdec.runner.memory sets aside so much and no more."""
    passes: list[GatheredAttention] = []
    make = TorchBackend.attention
    monkeypatch.setattr(TorchBackend, "attention", lambda *arguments: passes.append(make(*arguments)) or passes[-1])
    text = list(range(40))

    def told(count: int) -> list[torch.Tensor]:
        runner = runner_of(llama, num_slots=32 + 16 * 16)
        caches = [runner.new_cache() for _ in range(count)]
        for cache in caches:
            runner.move(cache.attach(text))
            runner.forward([segment_of(cache, text[len(cache) :], [])])
            cache.keep(range(len(text) - len(cache)))
            cache.remember(text)
        assert count < 16 or runner.pool.num_used == runner.pool.num_slots
        outputs = runner.forward([segment_of(cache, [number], []) for number, cache in enumerate(caches)])
        [kept] = {scratch.kept.nbytes for scratch in passes[-1].scratch}
        assert 2 * kept <= COPIES * runner.pool.num_slots * runner.bytes_per_slot // llama.config.num_hidden_layers
        return [output.logits for output in outputs]

    for number, logits in enumerate(told(16)):
        assert torch.equal(logits, told(number + 1)[number])
