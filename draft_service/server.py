"""The draft service, assembled: servicer, engine, server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from draft_service.codec import DraftCodec
from draft_service.drafter import Drafter
from draft_service.engine import DraftEngine
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer, ModelServicer
from specdec.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(ModelServicer, draft_pb2_grpc.DraftServiceServicer):
    def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        return self.streams.serve(request_iterator)


def create_server(drafter: Drafter, settings: EngineSettings) -> ModelServer:
    """A server that is not started yet. Call this on the event loop that will serve."""
    engine = DraftEngine(drafter, settings.max_sequences)
    servicer = DraftServicer(engine, DraftCodec(drafter.info), drafter.info, name="draft-model")
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    return ModelServer(servicer, add, SERVICE, settings=settings, role="draft", stream="Draft")
