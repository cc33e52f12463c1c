"""A drafter that is plain Python, and an engine around it: no gRPC, no torch."""

from __future__ import annotations

from draft_service.drafter import DraftSequence, Node
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Budget, Growth, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.server.step_loop import Key

VOCAB, CONTEXT = 10, 30
chain = TokenTree.chain
A, B = Key(1, 1), Key(1, 2)


def law(ids: list[int]) -> int:
    state = 5
    for token_id in ids:
        state = (state * 17 + token_id + 1) % 9973
    return state % VOCAB


def said(ids, count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(law(text))
    return text[len(ids) :]


class FakeDrafter:
    """A chain by ``law``, one node a pass; ``grow_with`` replaces that."""

    def __init__(self) -> None:
        self.info = ModelInfo("fake", "digest", VOCAB, "", CONTEXT)
        self.live: list[dict] = []
        self.grown: list[list[tuple[list[int], TokenTree]]] = []
        self.learnt: list[list[list[int]]] = []
        self.grow_with = None
        self.learn_error = None
        self.fail: Exception | None = None

    def open(self, spec: SequenceSpec) -> dict:
        self.live.append({"ids": spec.token_ids})
        return self.live[-1]

    def close(self, memory: dict) -> None:
        self.live = [each for each in self.live if each is not memory]

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 3, 5

    def learn(self, sequences):
        self.learnt.append([list(sequence.ids) for sequence in sequences])
        return [self.learn_error or True] * len(sequences)

    def grow(self, sequences):
        self.grown.append([(list(sequence.ids), sequence.tree) for sequence in sequences])
        if self.fail is not None:
            raise self.fail
        return [(self.grow_with or self.one)(sequence) for sequence in sequences]

    def one(self, sequence: DraftSequence) -> list[Node]:
        token = law([*sequence.ids, *sequence.tree.token_ids])
        probs = None if sequence.spec.keyed_by_token else SparseDistribution((token,), (1.0,))
        return [Node(len(sequence.tree) - 1, token, probs)]


def budget(nodes: int, depth: int | None = None) -> Budget:
    return Budget(nodes, nodes if depth is None else depth)


def opened(ids=(1, 2), nodes=0, *, key=A, engine=None, **spec) -> tuple[DraftEngine, FakeDrafter]:
    drafter = engine._drafter if engine else FakeDrafter()
    engine = engine or DraftEngine(drafter)
    engine.open(key, DraftOpen(SequenceSpec(tuple(ids), 2, **spec), budget(nodes)))
    return engine, drafter


def run(engine: DraftEngine, limit: int = 60) -> list[tuple[Key, Growth]]:
    """Steps until nothing waits."""
    results = []
    while not engine.idle:
        assert limit, "the engine never comes to rest"
        results += engine.step()
        limit -= 1
    return results


def growths(engine: DraftEngine) -> list[Growth]:
    return [growth for _, growth in run(engine)]
