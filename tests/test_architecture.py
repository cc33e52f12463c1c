"""Laws about the code itself: who may import whom, and how long things may be.

The arrows are three tables: the order of rooms, who may import what from outside, and what nobody else may touch. Each
rule is also shown a planted violation, which it must find.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.checkout import ROOT

SERVICES = ("draft_service", "target_service", "orchestrator", "gateway")
SHIPPED = ("specdec", *SERVICES)
UNSHIPPED = ("testing", "tests", "bench")
MAX_LINES = 350

SPECDEC_ORDER = (
    ("core", "v1"),
    ("kvcache", "speculation", "security", "telemetry"),
    ("passes", "sampling"),
    ("backends", "transport"),
    ("runner", "server", "client"),
    ("planner", "sync_client", "vllm", "bridges"),
    ("cli",),
)
"""A room imports rooms of earlier rows, and itself."""

ORCHESTRATOR_ORDER = (
    ("settings", "text", "request", "rounds", "tokenizer", "workers"),
    ("statistics",),
    ("sequence",),
    ("outbox", "replicas"),
    ("drafting", "verifying", "control"),
    ("decoder",),
    ("telemetry",),
    ("sample",),
    ("generation",),
    ("api",),
)

MAY_IMPORT = {
    "torch": (
        *("specdec.kvcache.store", "specdec.passes.outputs", "specdec.speculation.verification"),
        *("specdec.backends", "specdec.sampling", "specdec.runner", "specdec.vllm"),
        *("target_service.language_model", "target_service.decision", "target_service.reports"),
        *("target_service.self_draft", "target_service.heads", "target_service.vllm_decisions"),
        "draft_service.drafters",
    ),
    "transformers": ("specdec.backends", "specdec.runner"),
    "vllm": tuple(f"specdec.vllm.{name}" for name in ("engine", "worker", "worker_v1", "worker_v2", "worker_drafts")),
    "ctypes": ("specdec.backends.avx512",),
    "starlette": ("gateway",),
    "uvicorn": ("gateway",),
    "jinja2": ("orchestrator.tokenizer",),
    "llguidance": ("specdec.sampling", "orchestrator.api.grammars", "orchestrator.tokenizer"),
    "grpc": (
        *("specdec.transport", "specdec.security", "specdec.client", "specdec.cli", "specdec.bridges"),
        *("orchestrator.api", "orchestrator.replicas"),
    ),
    "specdec.v1": (
        *("specdec.transport", "specdec.server.model_server", "specdec.client", "specdec.sync_client", "specdec.cli"),
        "specdec.bridges",
        *("target_service.codec", "target_service.server", "draft_service.codec", "draft_service.server"),
        *("orchestrator.replicas", "orchestrator.api", "gateway"),
    ),
    "google": (
        *("specdec.core.errors", "specdec.transport", "specdec.cli"),
        *("orchestrator.replicas", "orchestrator.api"),
    ),
    "tenacity": ("orchestrator.replicas", "orchestrator.verifying.target_client"),
    "specdec.backends.torch": ("specdec.backends.torch", "specdec.backends.choice"),
    "specdec.backends.avx512": ("specdec.backends.avx512", "specdec.backends.choice"),
    "specdec.backends.cuda": ("specdec.backends.cuda", "specdec.backends.choice"),
    "triton": ("specdec.backends.cuda.kernels",),
    "orchestrator.control": ("orchestrator.control", "orchestrator.decoder", "orchestrator.sample"),
}
"""Modules and packages that may import the key when they are imported themselves."""

MUST_NOT_IMPORT = {
    "orchestrator.decoder": ("grpc", "tenacity", "opentelemetry", "google", "asyncio"),
    "specdec.speculation": ("grpc", "tenacity", "opentelemetry", "google", "asyncio"),
    "orchestrator.control": ("asyncio", "time", "grpc"),
    "orchestrator.api": ("orchestrator.decoder", "orchestrator.control"),
    "specdec.bridges": ("torch", "transformers", "vllm", "asyncio"),
    "draft_service.engine": ("torch", "transformers", "grpc", "google"),
    "target_service.engine": ("torch", "transformers", "grpc", "google"),
}

Arrows = Mapping[str, frozenset[str]]
"""By module, with its full name, what it imports."""


def sources(package: str) -> list[Path]:
    return [file for file in (ROOT / package).rglob("*.py") if ROOT / "specdec" / "v1" not in file.parents]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def statements(body: list[ast.stmt], *, everywhere: bool) -> Iterator[ast.stmt]:
    """Of a module those that run when it is imported, or all; but not those for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        runs_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            if not runs_later or everywhere:
                yield from statements(getattr(node, inner, []), everywhere=everywhere)


def imported(file: Path, *, everywhere: bool = False) -> Iterator[str]:
    """The modules that a file imports: with ``everywhere`` also those that a function imports when it is called."""
    for node in statements(ast.parse(file.read_text()).body, everywhere=everywhere):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            # "from package import submodule" imports package.submodule.
            is_module = ((node.module or "").replace(".", "/"), *(alias.name for alias in node.names))
            yield from (
                f"{node.module}.{name}" if (ROOT / is_module[0] / f"{name}.py").exists() else str(node.module)
                for name in is_module[1:]
            )


@cache
def arrows() -> Arrows:
    return {name_of(file): frozenset(imported(file)) for package in SHIPPED for file in sources(package)}


@cache
def unshipped_arrows() -> Arrows:
    """Also those of functions."""
    return {name_of(f): frozenset(imported(f, everywhere=True)) for package in UNSHIPPED for f in sources(package)}


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def against_the_order(arrows: Arrows, package: str, order: tuple[tuple[str, ...], ...]) -> set[tuple[str, str]]:
    """Arrows to another room of the same row, to a later one, or from a room that has no place."""
    row_of = {room: row for row, rooms in enumerate(order) for room in rooms}

    def room_of(module: str) -> str:
        return module.split(".")[1]

    found: set[tuple[str, str]] = set()
    for module, others in arrows.items():
        if not module.startswith(f"{package}.") or module.endswith("__main__"):
            continue
        own = row_of[room_of(module)]
        rooms = {other: room_of(other) for other in others if other.startswith(f"{package}.")}
        found |= {(module, other) for other, room in rooms.items() if room != room_of(module) and row_of[room] >= own}
    return found


def by_strangers(arrows: Arrows) -> set[tuple[str, str]]:
    """Imports of what only some may import."""
    return {
        (module, other)
        for module, others in arrows.items()
        for other in others
        for wanted, allowed in MAY_IMPORT.items()
        if is_in(other, wanted) and not is_in(module, *allowed)
    }


def forbidden(arrows: Arrows) -> set[tuple[str, str]]:
    return {
        (module, other)
        for module, others in arrows.items()
        for package, unknown in MUST_NOT_IMPORT.items()
        for other in others
        if is_in(module, package) and is_in(other, *unknown)
    }


def between_services(arrows: Arrows) -> set[tuple[str, str]]:
    """Services import specdec and themselves; specdec imports no service; nothing that is shipped imports the rest."""
    found = set()
    for module, others in arrows.items():
        own = module.partition(".")[0]
        strangers = {*UNSHIPPED, "pytest", "hypothesis", *SERVICES} - {own}
        found |= {(module, other) for other in others if other.partition(".")[0] in strangers}
    return found


def between_tests_and_bench(arrows: Arrows) -> set[tuple[str, str]]:
    """What they share is in testing, which imports neither. Tests of bench import bench."""
    return {
        (module, other)
        for module, others in arrows.items()
        for other in others
        if (is_in(other, "tests") and is_in(module, "testing", "bench"))
        or (is_in(other, "bench") and is_in(module, "testing", "tests") and not is_test_of_bench(module))
    }


def is_test_of_bench(module: str) -> bool:
    return is_in(module, "tests.bench") or module.rpartition(".")[2].startswith("test_bench_")


def circles(arrows: Arrows) -> set[tuple[str, str]]:
    """The last arrow of each circle that a walk along imports finds."""
    found: set[tuple[str, str]] = set()
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        for other in sorted(arrows.get(module, ())):
            if other in above or other == module:
                found.add((module, other))
            elif other in arrows and other not in done:
                walk(other, (*above, module))
        done.add(module)

    for module in sorted(arrows):
        if module not in done:
            walk(module, ())
    return found


RULES: dict[str, tuple[Callable[[Arrows], set[tuple[str, str]]], list[tuple[str, str]]]] = {
    "rooms of specdec are in order": (
        lambda arrows: against_the_order(arrows, "specdec", SPECDEC_ORDER),
        [
            ("specdec.core.tree", "specdec.kvcache.store"),
            ("specdec.runner.probe", "specdec.server.streams"),
            ("specdec.backends.base", "specdec.runner.memory"),
        ],
    ),
    "rooms of the orchestrator are in order": (
        lambda arrows: against_the_order(arrows, "orchestrator", ORCHESTRATOR_ORDER),
        [
            ("orchestrator.generation", "orchestrator.api.responses"),
            ("orchestrator.replicas.pool", "orchestrator.drafting.speculation"),
            ("orchestrator.decoder", "orchestrator.telemetry.round_clock"),
        ],
    ),
    "what only some may import": (
        by_strangers,
        [
            ("specdec.passes.rows", "torch"),
            ("orchestrator.decoder", "torch"),
            ("target_service.engine", "specdec.v1.target_pb2"),
            ("orchestrator.verifying.target_client", "specdec.v1.target_pb2"),
            ("orchestrator.drafting.draft_client", "specdec.v1.draft_pb2"),
            ("orchestrator.sequence", "grpc.aio"),
            ("orchestrator.verifying.target_client", "google.protobuf.message"),
            ("specdec.backends.torch.draw", "ctypes"),
            ("specdec.backends.avx512.backend", "specdec.backends.torch.backend"),
            ("specdec.runner.loading", "specdec.backends.avx512.kernels"),
            ("orchestrator.drafting.speculation", "orchestrator.control.cost_model"),
        ],
    ),
    "what some must not import": (
        forbidden,
        [
            ("orchestrator.decoder", "asyncio"),
            ("orchestrator.control.cost_model", "time"),
            ("orchestrator.api.service", "orchestrator.decoder"),
            ("draft_service.engine", "torch"),
            ("specdec.bridges.vllm", "vllm"),
        ],
    ),
    "services never import each other": (
        between_services,
        [
            ("target_service.engine", "draft_service.drafter"),
            ("specdec.client", "orchestrator.settings"),
            ("orchestrator.text", "tests.cluster"),
            ("specdec.cli.main", "bench.micro.rounds"),
        ],
    ),
    "tests and bench share testing": (
        between_tests_and_bench,
        [
            ("testing.lab", "bench.soak"),
            ("testing.lab", "tests.cluster"),
            ("bench.chaos.models", "tests.models.table_runner"),
            ("tests.faults.test_processes", "bench.chaos.models"),
        ],
    ),
    "no circles": (circles, [("specdec.core.tree", "specdec.core.rounds")]),
}


@pytest.mark.parametrize("rule", RULES)
def test_arrows_keep_to(rule):
    find, _ = RULES[rule]
    assert len(arrows_of(find)) > 100, "the test looks in the wrong place"
    assert not find(arrows_of(find))


def arrows_of(find: Callable[[Arrows], set[tuple[str, str]]]) -> Arrows:
    return unshipped_arrows() if find is between_tests_and_bench else arrows()


@pytest.mark.parametrize(
    ("rule", "arrow"), [(rule, arrow) for rule, (_, planted) in RULES.items() for arrow in planted], ids=str
)
def test_a_planted_violation_is_found(rule, arrow):
    module, other = arrow
    find, _ = RULES[rule]
    known = arrows_of(find)
    assert module in known, "there is no such module any more"
    assert find({**known, module: known[module] | {other}}) - find(known)


@pytest.mark.slow
def test_the_orchestrator_and_the_command_line_run_without_torch():
    """All that importing their modules imports."""
    without = [
        *(name_of(file) for file in sources("orchestrator")),
        *(
            name_of(file)
            for room in ("cli", "core", "transport", "telemetry", "security")
            for file in sources(f"specdec/{room}")
        ),
        *("specdec.client", "specdec.server.streams", "target_service.engine", "draft_service.engine"),
    ]
    program = (
        "import sys, importlib\n"
        "for name in ('torch', 'transformers', 'safetensors', 'numpy'): sys.modules[name] = None\n"
        f"for name in {without!r}: importlib.import_module(name)\n"
        "print(len(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_loop_fits_on_one_screen():
    tree = ast.parse((ROOT / "orchestrator" / "decoder.py").read_text())
    [decode] = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == "decode"]
    assert decode.end_lineno is not None
    assert decode.end_lineno - decode.lineno + 1 <= 25
    assert any(isinstance(node, ast.While) for node in decode.body), "decode is no longer the loop"


@pytest.mark.parametrize("package", [*SHIPPED, "bench", "testing", "deploy"])
def test_no_file_is_longer_than_one_concept(package):
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources(package)}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize("package", SHIPPED)
def test_every_file_says_what_it_knows(package):
    for file in sources(package):
        docstring = ast.get_docstring(ast.parse(file.read_text()))
        assert docstring, f"{file} has no docstring"
        if file.name == "__init__.py":
            assert "\nImports" in docstring, f"{file} does not say what the room may import"
            assert "\nStart at" in docstring, f"{file} does not say where to start"
