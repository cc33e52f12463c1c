"""The standard health service (grpc.health.v1), which a watcher that does not read cannot block.

grpcio's implementation writes to its watchers while it holds the lock for status changes. A single watcher could
therefore keep a service from stopping. Knows names and statuses; does not know why they change.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health servicer. A service is unknown until the first ``tell`` about it."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def tell(self, service: str, serving: bool) -> None:
        self._serving[service] = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Stream the status of one service. Statuses that are replaced while another is being written are skipped."""
        sent = None
        while True:
            changed = self._changed
            if (status := self._status(request.service)) != sent:
                await context.write(_Status(status=status))
                sent = status
            else:
                await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        serving = self._serving.get(service)
        return _Status.SERVICE_UNKNOWN if serving is None else _Status.SERVING if serving else _Status.NOT_SERVING
