"""The C functions of this package. They are compiled when it is installed, where there is a compiler; without them
everything works, but slower on some CPUs.

They are plain functions, which ctypes calls, and compute in the threads of torch's own OpenMP, which is there.
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
    """The function ``specdec_<name>``, which says whether there was memory; None where this machine cannot run it, or
    has AMX and that ``amx_is_faster``."""
    library = _library() if has_avx512_bf16(and_no_amx=amx_is_faster) else None
    function = getattr(library, f"specdec_{name}", None)
    if function is not None:
        function.argtypes, function.restype = argument_types, ctypes.c_int
    return function


def why_not() -> str | None:
    """Why none of them can be called here, in words; None: they can."""
    if not has_avx512_bf16(and_no_amx=False):
        return "this CPU has no AVX512-BF16"
    return None if _library() else "its C files were not compiled, or not for this machine; run `make setup`"


@functools.cache
def has_avx512_bf16(and_no_amx: bool = True) -> bool:
    """AMX computes a prompt's many rows several times as fast, by way of oneDNN."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16")) and not (and_no_amx and capabilities.get("amx_bf16"))


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("specdec.backends.avx512._kernels")
    if found is None or found.origin is None:
        return None
    if is_out_of_date(Path(found.origin)):
        log.warning("the C files are newer than what was compiled of them, so that is not used; run `make setup`")
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:  # compiled for another machine; a torch with another OpenMP
        return None


def is_out_of_date(library: Path) -> bool:
    """In a checkout, which may have been updated without compiling: other structures than Python's would be memory that
    is overwritten. What is installed otherwise is of one piece."""
    package = library.parent
    if not (package.parents[2] / "pyproject.toml").exists():
        return False
    sources = [*package.glob("*.c"), *package.glob("*.h")]
    return any(source.stat().st_mtime > library.stat().st_mtime for source in sources)
