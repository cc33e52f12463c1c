"""A function of memory that does not move, as a CUDA graph on a GPU. On a CPU it is called as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Captured(Generic[_Result]):
    """``compute``, captured at the first call. Its results are then the same tensors every time, with new numbers."""

    def __init__(self, compute: Callable[..., _Result], memory: Tensor, pool: Any = None) -> None:
        """``memory``: what ``compute`` reads and changes; all else that it writes has the same numbers a second time.
        ``pool``: of torch.cuda.graph_pool_handle, for graphs that are replayed one after the other."""
        self._compute, self._memory, self._pool = compute, memory, pool
        self._graph: Any = None
        self._result: _Result | None = None
        self._is_tried = memory.device.type != "cuda"

    def __call__(self, *given: Any) -> _Result:
        """Always with the same arguments."""
        if not self._is_tried:
            self._is_tried = True
            self._capture(*given)
        if self._result is None:
            return self._compute(*given)
        self._graph.replay()
        return self._result

    def _capture(self, *given: Any) -> None:
        device, before = self._memory.device, self._memory.clone()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # kernels are compiled, and libraries take their memory, before the capture
            self._compute(*given)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._result = self._compute(*given)
        except (RuntimeError, NotImplementedError) as error:
            log.warning("passes of this size run without a CUDA graph", extra={"reason": str(error).partition("\n")[0]})
        self._memory.copy_(before)
