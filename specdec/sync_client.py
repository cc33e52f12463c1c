"""The client for programs without asyncio: specdec.client on an event loop of its own, in a thread.

Knows how calls reach that loop; does not know what they say. Any number of threads may use one client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from specdec.client import Client, Metadata, Sample
from specdec.v1 import generation_pb2

T = TypeVar("T")


class SyncClient:
    """``with SyncClient("host:port") as client``. Arguments and errors are those of specdec.client.Client."""

    def __init__(self, *addresses: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specdec-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_new_client(*addresses, **options))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and connections. Idempotent."""
        if self._thread.is_alive():
            self._run(self._client.__aexit__())
            self._end()

    def stream(
        self, timeout_s: float | None = None, metadata: Metadata = (), **fields: Any
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """The responses to a GenerateRequest with these fields. Closing the iterator ends the request."""
        responses = self._client.stream(timeout_s, metadata, **fields)
        try:
            while (response := self._run(_next(responses))) is not None:
                yield response
        finally:
            self._run(responses.aclose())

    def generate(self, timeout_s: float | None = None, **fields: Any) -> list[Sample]:
        """All samples of a request, by index."""
        return self._run(self._client.generate(timeout_s, **fields))

    def server_info(self, timeout_s: float = 5.0) -> generation_pb2.GetServerInfoResponse:
        """The models, replicas and load of an orchestrator."""
        return self._run(self._client.server_info(timeout_s))

    def tokenize(self, timeout_s: float = 30.0, **fields: Any) -> generation_pb2.TokenizeResponse:
        """The ids of the prompt of a TokenizeRequest with these fields."""
        return self._run(self._client.tokenize(timeout_s, **fields))

    def detokenize(self, token_ids: Iterable[int], skip_special_tokens: bool = False, timeout_s: float = 30.0) -> str:
        """The text of ids."""
        return self._run(self._client.detokenize(token_ids, skip_special_tokens, timeout_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result()
        except BaseException:  # such as KeyboardInterrupt
            waiting.cancel()
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _new_client(*addresses: str, **options: Any) -> Client:
    return Client(*addresses, **options)


async def _next(responses: Any) -> generation_pb2.GenerateResponse | None:
    response: generation_pb2.GenerateResponse | None = await anext(responses, None)
    return response
