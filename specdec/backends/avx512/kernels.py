"""The C functions of this package, called through ctypes. Does not know what they compute.

The installation compiles them if there is a compiler; without them everything works, but slower on some CPUs. They
run in the threads of torch's OpenMP library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def kernel(name: str, *argument_types: Any, amx_is_faster: bool = True) -> Callable[..., int] | None:
    """The function ``specdec_<name>``, which returns 0 if it ran out of memory. None if this machine cannot run it, or
    has AMX and ``amx_is_faster`` is set."""
    library = _library() if has_avx512_bf16(and_no_amx=amx_is_faster) else None
    function = getattr(library, f"specdec_{name}", None)
    if function is not None:
        function.argtypes, function.restype = argument_types, ctypes.c_int
    return function


def why_not() -> str | None:
    """The reason why the C functions cannot be called here; None if they can."""
    if not has_avx512_bf16(and_no_amx=False):
        return "this CPU has no AVX512-BF16"
    return None if _library() else "its C files are not compiled, or not for this machine; run `make setup`"


@functools.cache
def has_avx512_bf16(and_no_amx: bool = True) -> bool:
    """``and_no_amx``: False for CPUs with AMX too, on which oneDNN computes a prompt's rows several times as fast."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16")) and not (and_no_amx and capabilities.get("amx_bf16"))


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("specdec.backends.avx512._kernels")
    if found is None or found.origin is None:
        return None
    if is_out_of_date(Path(found.origin)):
        log.warning("the C files are newer than the compiled library, which is not used; run `make setup`")
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:  # compiled for another machine, or torch has another OpenMP
        return None


def is_out_of_date(library: Path) -> bool:
    """Whether a checkout's sources are newer than ``library``: structures that differ from Python's would corrupt
    memory. False outside a checkout, where sources and library are installed together."""
    package = library.parent
    if not (package.parents[2] / "pyproject.toml").exists():
        return False
    sources = [*package.glob("*.c"), *package.glob("*.h")]
    return any(source.stat().st_mtime > library.stat().st_mtime for source in sources)
