"""How a bucket misbehaves on demand: throttling, outages, and objects that are seen late. Decisions only, no HTTP."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from urllib.parse import unquote_plus
from xml.sax.saxutils import unescape

_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


class Disturbance:
    """What is wrong with the bucket now. Thread-safe; everything can be set at any time.

    `rate` is the fraction of requests refused throughout, from a seeded generator. `lag_s` is how long a new object
    stays unseen by GET, HEAD and lists after its PUT; conditional PUTs see it at once, as the store itself does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._rate = 0.0
        self._lag_s = 0.0
        self._count = 0
        self._until = 0.0
        self._code = "SlowDown"
        self._seen_from: dict[str, float] = {}
        self._tear = ""
        self.torn = False
        """Whether an object was refused because of `tear`."""

    def set(
        self,
        rate: float | None = None,
        lag_s: float | None = None,
        count: int | None = None,
        seconds: float | None = None,
        code: str | None = None,
        seed: int | None = None,
        tear: str | None = None,
    ) -> None:
        """Change what is given. `count` requests from now, and all for `seconds`, are refused with S3 error `code`, and
        so are writes to keys that end in `tear` (none if it is empty)."""
        with self._lock:
            if tear is not None:
                self._tear, self.torn = tear, False
            self._rate = self._rate if rate is None else rate
            self._lag_s = self._lag_s if lag_s is None else lag_s
            self._count = self._count if count is None else count
            self._until = self._until if seconds is None else self._clock() + seconds
            self._code = code or self._code
            if seed is not None:
                self._random = random.Random(seed)

    def refusal(self) -> str | None:
        """The S3 error code to answer this request with (status 503), or None to serve it."""
        with self._lock:
            if self._count > 0:
                self._count -= 1
                return self._code
            if self._clock() < self._until or (self._rate and self._random.random() < self._rate):
                return self._code
            return None

    def tears(self, path: str) -> str | None:
        """The S3 error code to answer a write of `/bucket/key` with (status 503), or None to serve it."""
        with self._lock:
            if not self._tear or not path.endswith(self._tear):
                return None
            self.torn = True
            return self._code

    @property
    def lags(self) -> bool:
        """Whether writes have to be reported with `wrote`."""
        return self._lag_s > 0

    def wrote(self, path: str) -> None:
        """An object that did not exist was written at `/bucket/key`."""
        with self._lock:
            self._seen_from[path] = self._clock() + self._lag_s

    def hidden(self, path: str) -> bool:
        """Whether the object at `/bucket/key` is not seen yet."""
        with self._lock:
            seen_from = self._seen_from.get(path)
            if seen_from is None:
                return False
            if self._clock() < seen_from:
                return True
            del self._seen_from[path]
            return False

    def trim(self, bucket: str, listing: bytes) -> bytes:
        """Leave out of a ListObjectsV2 answer (with or without encoding-type=url) what is not seen yet."""

        def keep(entry: re.Match[bytes]) -> bytes:
            key = _KEY.search(entry[0])
            name = unquote_plus(unescape(key[1].decode())) if key else ""
            return b"" if self.hidden(f"/{bucket}/{name}") else entry[0]

        return _ENTRY.sub(keep, listing)
