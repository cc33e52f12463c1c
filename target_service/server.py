"""The target service, assembled: servicer, engine, server."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from specdec.core.rounds import AUTONOMOUS, EARLY
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer, ModelServicer
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine
from target_service.verifier import Verifier

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class TargetServicer(ModelServicer, target_pb2_grpc.TargetServiceServicer):
    def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        return self.streams.serve(request_iterator)


def create_server(verifier: Verifier[Any], settings: EngineSettings) -> ModelServer:
    """A server that is not started yet. Call this on the event loop that will serve."""
    engine = TargetEngine(verifier, settings.max_sequences)
    info = dataclasses.replace(verifier.info, capabilities=(*verifier.info.capabilities, AUTONOMOUS, EARLY))
    servicer = TargetServicer(engine, TargetCodec(info), info, name="target-model")
    register = target_pb2_grpc.add_TargetServiceServicer_to_server
    return ModelServer(servicer, register, SERVICE, settings=settings, role="target", stream="Verify")
