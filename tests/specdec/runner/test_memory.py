"""The size of the KV pool: by setting or by what is free, never more than can be used."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from specdec.core.limits import MAX_CHAIN_NODES, MAX_TREE_ROWS
from specdec.passes.prefill import ROWS_PER_PASS
from specdec.runner import cgroup, memory
from specdec.runner.memory import MemoryPlan, Shape, largest_pass, plan
from specdec.sampling.noise_cache import MAX_KEPT_ROWS

GIB = 1 << 30
SIZES = dict(hidden_size=1024, widest=2816, vocab_size=8192, num_layers=24, context_length=8192)
SHAPE = Shape(**SIZES, element_bytes=2, num_heads=16, num_kv_heads=4)
SLOT = 24 * 2 * 4 * 64 * 2  # layers, keys and values, heads, features, bytes


def planned(free: int = 8 * GIB, kv_slots: int = 0, fraction: float = 0.4, max_sequences: int = 1024) -> MemoryPlan:
    return plan(SHAPE, GIB, SLOT, free, kv_slots, fraction, max_sequences)


def test_the_pool_takes_its_fraction_with_the_activations_and_copies_counted():
    result = planned()
    assert result.activations == largest_pass(SHAPE)
    used = result.num_slots * result.bytes_per_slot + result.activations
    assert 0.9 * 0.4 * 8 * GIB < used < 0.4 * 8 * GIB
    assert planned(fraction=0.8).num_slots > 2 * result.num_slots
    assert planned(free=16 * GIB).num_slots > 2 * result.num_slots


def test_two_services_that_start_one_after_the_other_leave_something():
    first = planned(free=8 * GIB)
    taken = first.num_slots * SLOT + first.activations
    second = planned(free=8 * GIB)  # what the first has taken but not touched still counts as free
    assert taken + second.num_slots * SLOT + second.activations < 8 * GIB


def test_the_pool_holds_no_more_than_can_be_used():
    assert planned(free=1000 * GIB, max_sequences=3).num_slots == 3 * 8192


def test_a_number_that_is_set_is_kept_if_it_fits():
    assert planned(kv_slots=1000).num_slots == 1000
    with pytest.raises(
        ValueError, match=r"--kv-slots 1000000 needs .* GiB, .* 8 GiB are free; \d+ would fit"
    ) as caught:
        planned(kv_slots=1_000_000)
    num_fit = int(str(caught.value).split("; ")[1].split()[0])
    assert planned(kv_slots=num_fit).num_slots == num_fit
    with pytest.raises(ValueError, match="would fit"):
        planned(kv_slots=num_fit + 1)


def test_no_room_is_a_sentence_for_the_operator():
    with pytest.raises(
        ValueError, match=r"no memory is left for the KV cache: .*weights \(1 GiB\).*raise --memory-fraction"
    ):
        planned(free=GIB // 4)


def test_the_largest_pass_grows_with_what_is_in_it():
    more = dict(hidden_size=4096, widest=9999, vocab_size=150_000, context_length=131_072, num_heads=32, num_reaches=2)
    for field, value in (*more.items(), ("caps_scores", True)):
        assert largest_pass(dataclasses.replace(SHAPE, **{field: value})) > largest_pass(SHAPE), field
    capped = largest_pass(dataclasses.replace(SHAPE, caps_scores=True)) - largest_pass(SHAPE)
    assert capped >= 3 * 4 * 16 * ROWS_PER_PASS * 8192, "three copies in float32, for all heads at once"


def test_the_largest_pass_counts_verification_and_the_kept_noise():
    """At a vocabulary of 152k: as many rows as a pass may have, a chain in float64, and the noise."""
    large = dataclasses.replace(SHAPE, vocab_size=152_000)
    logits = MAX_TREE_ROWS * 152_000 * 2
    chain = (1 + MAX_CHAIN_NODES) * 152_000 * 8 * 5  # two distributions, and what is between them
    noise = MAX_KEPT_ROWS * 152_000 * 8
    assert largest_pass(large) > logits + chain + noise


def test_free_memory_is_the_machines_or_the_containers(monkeypatch):
    monkeypatch.setattr(cgroup, "memory_left", lambda: math.inf)
    free = memory.free_memory(torch.device("cpu"))
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert free == pytest.approx(1024 * int(available[1]), rel=0.2)
    monkeypatch.setattr(cgroup, "memory_left", lambda: 12345.0)
    assert memory.free_memory(torch.device("cpu")) == 12345
