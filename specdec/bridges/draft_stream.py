"""One stream to a draft service, carried by a thread, for a caller that is not asynchronous.

Knows connections, frames and which sequences are open; does not know texts, nor the engine that asks.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from specdec.core.environment import proxy_options
from specdec.core.errors import ModelMismatch, ReplicaLost, SpecdecError, from_status
from specdec.core.rounds import Growth, ModelInfo
from specdec.runner.vocabulary import Vocabulary, mismatch
from specdec.security.tls import Tls
from specdec.transport import rpc
from specdec.transport.wire import read_growth, read_info
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Inbox = deque[Growth | SpecdecError]
"""What has arrived for one sequence. After an error nothing comes: the sequence has ended."""

_TIMEOUT_S = 5.0
_RECONNECT_S = 1.0
_IDLE_S = 5.0
"""After so long without a frame all sequences are closed: the engine does not say that its last request has ended."""


class DraftStream:
    """A stream to the first of ``addresses`` that can be used; after a loss the next one is tried, until ``close``.

    ``target``, ``tokens``: what verifies, which must share the draft's vocabulary. Methods are for one other thread.
    """

    def __init__(self, addresses: Sequence[str], tls: Tls | None, target: ModelInfo, tokens: Vocabulary) -> None:
        self._addresses, self._tls, self._target, self._tokens = addresses, tls, target, tokens
        self.draft: ModelInfo | None = None
        self.problem: SpecdecError | None = None  # why there is no draft
        self.epoch = 0  # sequences that were opened in an earlier one are closed
        self._inboxes: dict[int, Inbox] = {}
        self._frames: SimpleQueue[draft_pb2.DraftRequest | None] = SimpleQueue()  # of this epoch; None ends the stream
        self._changed = threading.Condition()  # guards all of the above
        self._closed = threading.Event()
        self._logged = ""
        self._thread = threading.Thread(target=self._carry, name="specdec-draft", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the stream and its thread. Idempotent."""
        atexit.unregister(self.close)
        self._closed.set()
        self._frames.put(None)
        self._thread.join(2 * _TIMEOUT_S)

    def wait(self, answered: Callable[[], bool], timeout_s: float) -> None:
        """Until ``answered()``, for at most ``timeout_s``; not at all while the draft is lost."""
        with self._changed:
            self._changed.wait_for(lambda: answered() or self.problem is not None, timeout_s)

    def send(self, epoch: int, frames: Sequence[draft_pb2.DraftRequest], opened: dict[int, Inbox]) -> None:
        """Write frames, which open the sequences of ``opened``; not if ``epoch`` has ended meanwhile."""
        with self._changed:
            if epoch == self.epoch and self.draft is not None:
                self._inboxes.update(opened)
                for frame in frames:
                    self._frames.put(frame)
                    for sequence in frame.closes:
                        self._inboxes.pop(sequence, None)

    def _carry(self) -> None:
        for address in itertools.cycle(self._addresses):
            try:
                self._talk(address)
                error: SpecdecError = ReplicaLost("it ended the stream")
            except grpc.RpcError as failure:
                error = rpc.error_of(failure)  # type: ignore[arg-type]  # it is a call as well
            except SpecdecError as failure:
                error = failure
            if str(error) != self._logged:  # each attempt to connect may fail in the same way
                log.warning("no drafts from %s: %s", address, error)
            self._logged = str(error)
            self._begin(None, error)
            if self._closed.wait(_RECONNECT_S):
                return

    def _talk(self, address: str) -> None:
        """One stream, until it ends."""
        options = [*rpc.CHANNEL_OPTIONS, *proxy_options(), ("grpc.ssl_target_name_override", "draft")]
        with (
            grpc.secure_channel(address, self._tls.channel_credentials(), options)
            if self._tls
            else grpc.insecure_channel(address, options)
        ) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            info = read_info(stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=_TIMEOUT_S).model)
            if problem := mismatch(info, self._target, self._tokens):
                raise ModelMismatch(f"draft {address} {problem}")
            self._begin(info, None)
            for response in stub.Draft(self._requests(self._frames)):
                self._logged = ""
                self._deliver(response)

    def _begin(self, draft: ModelInfo | None, problem: SpecdecError | None) -> None:
        """An epoch, with a draft or without."""
        with self._changed:
            self._frames.put(None)
            self._frames = SimpleQueue()
            self._inboxes.clear()
            self.epoch += 1
            self.draft, self.problem = draft, problem
            self._changed.notify_all()

    def _requests(self, frames: SimpleQueue[Any]) -> Iterator[draft_pb2.DraftRequest]:
        """What gRPC writes."""
        while not self._closed.is_set():
            try:
                frame = frames.get(timeout=_IDLE_S)
            except Empty:
                with self._changed:
                    if not (self._inboxes and frames is self._frames and frames.empty()):
                        continue
                    frame = draft_pb2.DraftRequest(closes=self._inboxes)
                    self._inboxes.clear()
                    self.epoch += 1
            if frame is None:
                return
            yield frame

    def _deliver(self, response: draft_pb2.DraftResponse) -> None:
        """Raises InvalidArgument if a growth is malformed. What comes for closed sequences is dropped."""
        with self._changed:
            for growth in response.growths:
                if (inbox := self._inboxes.get(growth.sequence)) is not None:
                    inbox.append(read_growth(growth, self._target.vocab_size))
            for error in response.errors:
                if (inbox := self._inboxes.pop(error.sequence, None)) is not None:
                    inbox.append(from_status(error.status))
            self._changed.notify_all()
