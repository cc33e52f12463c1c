"""A question to an endpoint outside of a stream: which model it serves."""

from __future__ import annotations

from typing import Any

import grpc

from specdec.core.rounds import Load, ModelInfo
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2

_INFO_TIMEOUT_S = 2.0


async def model_info(
    get_info: grpc.aio.UnaryUnaryMultiCallable[Any, Any], tokens: bool = False
) -> tuple[ModelInfo, Load]:
    """The model of an endpoint and its load; ``tokens``: with all its tokens. Raises SpecdecError."""
    try:
        response: common_pb2.GetModelInfoResponse = await get_info(
            common_pb2.GetModelInfoRequest(tokens=tokens), timeout=_INFO_TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        raise rpc.error_of(error) from error
    return wire.read_info(response.model), wire.read_load(response.load)
