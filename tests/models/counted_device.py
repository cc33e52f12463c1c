"""A device that counts how often the host waits for it. It computes on the CPU, so its numbers are the CPU's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("meta")  # the only kind that torch has without a driver and does not compute on itself

_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")


class _There(torch.Tensor):
    """A tensor on the device. ``here`` has its numbers."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> _There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, dtype=here.dtype, device=DEVICE, strides=here.stride()
        )
        made.here = here
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        assert not _has_list(index), "a list as an index: the host waits"
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not _has_list(index), "a list as an index: the host waits"
        super().__setitem__(index, value)

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:
        raise AssertionError(f"{operation} outside of the counted device")


class CountedDevice(TorchDispatchMode):
    """``with`` it torch's operations work on DEVICE. ``waits``: those for which the host waits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.num_operations = 0

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, there = operation.name(), []
        tree_map_only(_There, there.append, (args, kwargs))
        to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not there and to != DEVICE:
            return operation(*args, **kwargs)
        assert name != "aten::lift_fresh", "a list became a tensor on the device: the host waits"
        self.num_operations += 1
        if _waits(name, args, kwargs, to):
            self.waits[name] += 1
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map_only(_There, lambda tensor: tensor.here, (args, kwargs))
        result = operation(*inner_args, **inner_kwargs)
        if to is not None and to != DEVICE:
            return result
        changed = {id(tensor.here): tensor for tensor in there}  # of operations in place
        return tree_map_only(
            Tensor, lambda tensor: changed[id(tensor)] if id(tensor) in changed else _There(tensor), result
        )


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else (index,)))


def _waits(name: str, args: Any, kwargs: Any, to: torch.device | None) -> bool:
    if name == "aten::_to_copy":
        return to is not None and (to.type == "cpu" or (args[0].device != to and not kwargs.get("non_blocking")))
    if name == "aten::copy_":
        return args[0].device != args[1].device and not (args[2:] or [kwargs.get("non_blocking")])[0]
    if name in ("aten::index.Tensor", "aten::index_put_"):
        return any(index is not None and index.dtype is torch.bool for index in args[1])
    return name in _READS
