"""A value that is read from files and read again when they change, also while a service runs.

If new files are invalid, this is logged and the last valid value stays in use. Knows files, but not their contents.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Changing(Generic[T]):
    """A value made from ``files`` by ``read``, which raises ValueError or OSError. The constructor passes these on.

    Thread-safe, because gRPC asks for certificates from its own threads, at every handshake.
    """

    def __init__(self, files: Sequence[str], read: Callable[[], T]) -> None:
        self.version = 0
        """Increases with every change that took effect."""
        self._files = [file for file in files if file]
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._last = read()

    def current(self) -> T:
        with self._lock:
            if (stamp := self._stamp()) != self._seen:
                self._seen = stamp
                try:
                    self._last = self._read()
                    self.version += 1
                    log.info("files read again", extra={"files": self._files})
                except (OSError, ValueError) as error:
                    # Perhaps only some of several files have been written so far.
                    log.error("the new files are not used, the old ones stay", extra={"reason": str(error)})
            return self._last

    def _stamp(self) -> object:
        try:
            stats = [os.stat(file) for file in self._files]
        except OSError as error:
            return str(error)
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]
