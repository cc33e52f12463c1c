"""A verifier that is plain Python, and an engine around it: no gRPC, no torch."""

from __future__ import annotations

from specdec.core.rounds import ModelInfo, Timings, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import ROOT, TokenTree
from specdec.server.step_loop import Key
from target_service.engine import TargetEngine
from target_service.verifier import Decision, Job, TargetOpen

VOCAB, CONTEXT = 10, 30
chain = TokenTree.chain
A, B = Key(1, 1), Key(1, 2)


def law(ids: list[int]) -> int:
    state = 7
    for token_id in ids:
        state = (state * 31 + token_id + 1) % 10_007
    return state % VOCAB


def said(ids, count: int) -> list[int]:
    """The next tokens after ids."""
    text = list(ids)
    for _ in range(count):
        text.append(law(text))
    return text[len(ids) :]


class FakeVerifier:
    """Greedy by ``law``. ``next_outcome`` of a memory overrides its decisions; ``fail`` raises in the pass."""

    block_size = 0

    def __init__(self) -> None:
        self.info = ModelInfo("fake", "digest", VOCAB, "", CONTEXT)
        self.live: list[dict] = []
        self.jobs: list[list[Job]] = []
        self.fail: Exception | None = None

    def open(self, spec: SequenceSpec) -> dict:
        self.live.append({"spec": spec, "outcomes": []})
        return self.live[-1]

    def close(self, memory: dict) -> None:
        self.live = [each for each in self.live if each is not memory]

    def cache_use(self) -> tuple[int, int]:
        return 300, 5000

    def verify(self, jobs):
        self.jobs.append([Job(job.memory, list(job.ids), job.tree) for job in jobs])
        if self.fail is not None:
            raise self.fail
        return [self._decide(job) for job in jobs], Timings(pass_us=5, sample_us=6, rows=7, sequences=len(jobs))

    def _decide(self, job: Job):
        if job.memory["outcomes"]:
            return job.memory["outcomes"].pop(0)
        text, accepted, node = list(job.ids), [], ROOT
        while (child := job.tree.child(node, law(text))) is not None:
            node = child
            accepted.append(child)
            text.append(job.tree.token_ids[child])
        return Decision(tuple(accepted), law(text), (law(list(job.ids)), *job.tree.token_ids))


def opened(ids=(1, 2), *, key=A, engine=None, first=True, **options) -> tuple[TargetEngine, FakeVerifier]:
    """An engine with a sequence of which, if ``first``, the first token is said."""
    verifier = engine._verifier if engine else FakeVerifier()
    engine = engine or TargetEngine(verifier)
    spec = {name: options.pop(name) for name in ("method", "sampling") if name in options}
    engine.open(key, TargetOpen(SequenceSpec(tuple(ids), 2, **spec), **options))
    if first:
        engine.step()
    return engine, verifier


def text_of(engine: TargetEngine, key=A) -> list[int]:
    return engine._sequences[key].ids


def run(engine: TargetEngine, limit: int = 50) -> list[Verdict]:
    verdicts = []
    while not engine.idle and limit:
        verdicts += [verdict for _, verdict in engine.step()]
        limit -= 1
    return verdicts
