"""What grows ahead and is dropped leaves no KV row behind: every row that is not kept is given back."""

from __future__ import annotations

import random
from collections.abc import Sequence

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Advance, Budget
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.prefix_index import TextBlock
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.server.step_loop import Key
from tests.draft_service.engines import sequence_of
from tests.models.table_runner import TableRunner

ROUNDS, SEQUENCES, PROMPT = 960, 12, (1, 2, 3)
AHEAD = Budget(3, 7, 20)


class CountingPool(BlockPool):
    """Counts what goes out and what comes back. A row is a block."""

    num_taken = num_freed = 0

    def take(self, num_blocks: int) -> list[int]:
        blocks = super().take(num_blocks)
        self.num_taken += num_blocks
        return blocks

    def give_back(self, block: int) -> None:
        self.num_freed += 1
        super().give_back(block)

    def hold(self, known: TextBlock) -> None:
        before = self.num_free_blocks
        super().hold(known)
        self.num_taken += before - self.num_free_blocks

    def let_go(self, known: TextBlock) -> None:
        before = self.num_free_blocks
        super().let_go(known)
        self.num_freed += self.num_free_blocks - before


class CountingRunner(TableRunner):
    """Counts the rows of nodes: those behind the committed text of the one sequence there is."""

    num_rows = num_node_rows = 0
    base = 0

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        for segment in segments:
            self.num_rows += len(segment.token_ids)
            end = segment.num_context + len(segment.parents)
            self.num_node_rows += max(0, end - max(self.base, segment.num_context + segment.num_kept))
        outputs = super().forward(segments)
        num_further = sum(len(output.further) for output in outputs)
        self.num_rows += num_further
        self.num_node_rows += num_further
        return outputs


def verdict(tree: TokenTree, flying: TokenTree, chance: random.Random) -> list[int]:
    """Some of what flies and one token more, which is mostly one that was grown ahead there."""
    num_accepted = chance.randrange(len(flying) + 1)
    accepted = list(flying.token_ids[:num_accepted])
    children = [t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == num_accepted - 1]
    rejected = set(flying.token_ids[num_accepted : num_accepted + 1])
    foreseen = [token for token in children if token not in rejected]
    others = [token for token in range(8) if token not in rejected]
    return [*accepted, chance.choice(foreseen if foreseen and chance.random() < 0.7 else others)]


def test_every_node_that_is_dropped_frees_its_row() -> None:
    chance = random.Random(7)
    runner = CountingRunner(seed=3, context_length=2048, block_size=1)
    pool = runner.pool = CountingPool(4096, 1)
    drafter = LanguageModelDrafter(runner)
    engine = DraftEngine(drafter)
    num_hits = num_rounds = 0
    for number in range(SEQUENCES):
        key = Key(1, number)
        spec = SequenceSpec(PROMPT, len(PROMPT), SamplingParams(1.0), number, cache_salt=bytes([number]))
        runner.base = len(PROMPT)
        engine.open(key, DraftOpen(spec, Budget()))
        fed, freed = runner.num_rows, pool.num_freed
        ids, tree, committed = list(PROMPT), EMPTY_TREE, []
        for round_ in range(1, ROUNDS // SEQUENCES + 1):
            flying = tree.prefix(3)
            ids += committed
            runner.base = len(ids)
            budget = Budget(0 if flying else AHEAD.max_nodes, AHEAD.max_depth, AHEAD.max_ahead)
            engine.submit(key, Advance(round_, len(ids), tuple(committed), flying, budget))
            for _ in range(chance.randrange(1, 9)):  # the verdict comes in the middle of it
                if not engine.idle:
                    for _, growth in engine.step():
                        tree = tree.merge(growth.tree) if growth.base == len(ids) else tree
            flying = flying or tree.prefix(3).trunk()
            committed = verdict(tree, flying, chance)
            tree = tree.descend(committed)
            num_hits += bool(tree)
            num_rounds += 1
            cache = sequence_of(engine, key).state.cache
            num_held = len(cache.text) + len(cache.tree)
            assert pool.num_used == num_held, "only what is cached is held"
            assert len(cache.text) <= len(ids)
        dropped = runner.num_rows - fed - num_held
        assert pool.num_freed - freed == dropped > 0
        engine.close(key)
        assert pool.num_used == 0
    assert num_rounds == ROUNDS
    assert num_hits > ROUNDS / 10
    assert pool.num_taken == runner.num_rows, "a row is fed into a slot of its own"
    assert pool.num_freed == runner.num_rows
    assert 2 * ROUNDS < runner.num_node_rows < 12 * ROUNDS
    pool.forget()
    assert pool.num_free_blocks == 4096, "as at the beginning"


def test_rows_of_nodes_are_those_behind_the_text() -> None:
    runner = CountingRunner(seed=3)
    runner.base = 3
    runner.forward([Segment([1, 2, 3, 4, 5], [ROOT, 0, 1, 2, 2], 0, list(range(8)), [])])
    runner.forward([Segment([4], [ROOT], 3, list(range(8)), [])])
    runner.forward([Segment([6, 7], [ROOT, 0, 0, 1], 3, list(range(8)), [])])
    assert (runner.num_rows, runner.num_node_rows) == (8, 5)


class WatchfulRunner(TableRunner):
    """Fed a text twice, it complains."""

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        outputs = super().forward(segments)
        for segment in segments:
            slots = [self._slot(segment, place) for place in range(segment.num_context + len(segment.parents))]
            tokens = [self._token_of_slot[slot] for slot in slots]
            texts: list[tuple[int, ...]] = []
            for row, parent in enumerate(segment.parents):
                above = texts[parent] if parent != ROOT else tuple(tokens[: segment.num_context])
                texts.append((*above, tokens[segment.num_context + row]))
            for text in texts[segment.num_kept :]:
                assert text not in self.fed
                self.fed.add(text)
        return outputs

    def __init__(self) -> None:
        super().__init__(seed=3, context_length=2048)
        self.fed: set[tuple[int, ...]] = set()


def test_no_row_is_fed_twice() -> None:
    chance, runner = random.Random(8), WatchfulRunner()
    engine = DraftEngine(LanguageModelDrafter(runner))
    key, ids = Key(1, 1), list(PROMPT)
    engine.open(key, DraftOpen(SequenceSpec(PROMPT, len(PROMPT), SamplingParams(1.0), 5), AHEAD))
    tree, new = EMPTY_TREE, []
    for round_ in range(1, 70):
        flying = tree.prefix(3)
        budget = Budget(0 if flying else AHEAD.max_nodes, AHEAD.max_depth, AHEAD.max_ahead)
        engine.submit(key, Advance(round_, len(ids), tuple(new), flying, budget))
        while not engine.idle:
            for _, growth in engine.step():
                tree = tree.merge(growth.tree.under(growth.path))
        node = chance.randrange(len(tree))  # what comes true, and perhaps one token more
        new = list(tree.path_ids(node)) + [9] * chance.randrange(2)
        ids += [token % 8 for token in new]
        new = ids[len(ids) - len(new) :]
        tree = tree.descend(new)
    assert len(runner.fed) > 500
