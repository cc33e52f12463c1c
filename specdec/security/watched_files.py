"""What is read from files that may be replaced while a service runs: read again when they changed.

What is no good is logged, and the last good one stays in use. Knows files; refuses to know what is in them.
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
    """``read`` makes it of the files, and raises ValueError or OSError; the first time that goes to the caller.

    May be asked from any thread: gRPC does so from its own, at every handshake.
    """

    def __init__(self, files: Sequence[str], read: Callable[[], T]) -> None:
        self.version = 0
        """Rises with every change that was taken over."""
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
                    # Half of a change, perhaps: of several files each is written for itself.
                    log.error("the new files are not used, the old ones stay", extra={"reason": str(error)})
            return self._last

    def _stamp(self) -> object:
        try:
            stats = [os.stat(file) for file in self._files]
        except OSError as error:
            return str(error)
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]
