"""Laws about the code itself: who may import whom, how long things may be, what is generated from what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.generate import generate
from tests.checkout import ROOT

SERVICES = ("draft_service", "target_service", "orchestrator")
MAX_LINES = 350


def sources(package: str) -> list[Path]:
    files = [file for file in (ROOT / package).rglob("*.py") if ROOT / "specdec" / "v1" not in file.parents]
    return files


def imported(file: Path) -> Iterator[str]:
    """Every module a file imports, anywhere in it, with its full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = file.relative_to(ROOT).parent.parts[: -(node.level - 1) or None] if node.level else ()
            module = ".".join((*base, node.module or "")).rstrip(".")
            # "from package import submodule" imports package.submodule.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def tops(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(file)}


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service):
    for file in sources(service):
        assert not tops(file) & (set(SERVICES) - {service}), file
    assert any("specdec" in tops(file) for file in sources(service)), "the test looks in the wrong place"


def test_specdec_imports_no_service():
    assert len(sources("specdec")) > 10, "the test looks in the wrong place"
    for file in sources("specdec"):
        assert not tops(file) & {*SERVICES, "tests", "bench"}, file


@pytest.mark.parametrize("package", [*SERVICES, "specdec"])
def test_nothing_that_is_shipped_imports_the_tests(package):
    for file in sources(package):
        assert not tops(file) & {"tests", "pytest", "hypothesis"}, file


@pytest.mark.parametrize(
    ("room", "unknown"),
    [
        ("control", {"orchestrator.replicas", "orchestrator.api", "grpc", "asyncio", "time"}),
        ("replicas", {"orchestrator.api", "orchestrator.control"}),
        ("api", {"orchestrator.control", "orchestrator.decoder"}),
    ],
)
def test_the_rooms_of_the_orchestrator_know_nothing_of_each_others_business(room, unknown):
    files = sources(f"orchestrator/{room}")
    assert len(files) > 5, "the test looks in the wrong place"
    for file in files:
        names = {".".join(name.split(".")[:depth]) for name in imported(file) for depth in (1, 2)}
        assert not names & unknown, file


@pytest.mark.parametrize("file", ["orchestrator/decoder.py", "specdec/speculation/verification.py"])
def test_the_pages_read_first_know_nothing_of_the_network(file):
    assert not tops(ROOT / file) & {"grpc", "tenacity", "opentelemetry", "google", "asyncio"}


@pytest.mark.parametrize("engine", ["draft_service/engine.py", "target_service/engine.py"])
def test_the_engines_know_neither_tensors_nor_the_network(engine):
    assert not tops(ROOT / engine) & {"torch", "transformers", "grpc", "google"}


def test_the_orchestrator_and_the_command_line_run_without_torch():
    modules = [
        *(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sources("orchestrator")),
        *(
            f"specdec.{name}"
            for name in (
                *("client", "cli.main", "cli.doctor", "core.tree", "core.errors", "core.noise", "core.settings"),
                *("transport.wire", "telemetry.setup"),
            )
        ),
        "specdec.server.streams",
        "target_service.engine",
        "draft_service.engine",
    ]
    names = [name.removesuffix(".__init__") for name in modules]
    program = (
        "import sys, importlib\n"
        "for name in ('torch', 'transformers', 'safetensors', 'numpy'): sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
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


@pytest.mark.parametrize("package", ["specdec", *SERVICES, "bench", "deploy"])
def test_no_file_is_longer_than_one_concept(package):
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources(package)}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize("package", [*SERVICES, "specdec"])
def test_every_file_says_what_it_knows(package):
    for file in sources(package):
        if source := file.read_text():
            assert ast.get_docstring(ast.parse(source)), f"{file} has no docstring"


def test_generated_code_is_what_protoc_makes_of_the_contract(tmp_path):
    generate(tmp_path)
    fresh = {str(file.relative_to(tmp_path)): file for file in tmp_path.rglob("*.py*")}
    committed = {
        str(file.relative_to(ROOT)): file
        for file in (ROOT / "specdec" / "v1").glob("*.py*")
        if file.name != "__init__.py"
    }
    assert fresh.keys() == committed.keys()
    assert len(fresh) >= 9, "four contract files make three modules each"
    for name, file in fresh.items():
        assert file.read_bytes() == committed[name].read_bytes(), f"{name} differs: run make protos"


@pytest.mark.parametrize("proto", sorted((ROOT / "protos").rglob("*.proto")), ids=lambda file: file.stem)
def test_every_rpc_says_what_it_does(proto):
    lines = [line.strip() for line in proto.read_text().splitlines()]
    rpcs = [number for number, line in enumerate(lines) if line.startswith("rpc ")]
    assert rpcs or not any(line.startswith("service ") for line in lines)
    for number in rpcs:
        assert lines[number - 1].startswith("//"), f"{proto.name}: {lines[number]} has no comment"


def test_the_contract_lies_where_its_package_says():
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert len(protos) == 4
    for file in protos:
        assert file.parent == ROOT / "protos" / "specdec" / "v1"
        assert "\npackage specdec.v1;\n" in file.read_text()
