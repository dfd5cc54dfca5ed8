"""The replica set: which engines belong to the run, and where they are.

Whoever leads the run writes `runs/<run>/replicas/<index>.json` for each replica Job and deletes it to let the replica
go. Engines can be named by hand, too: on the command line, or over POST /asyncgrpo/replicas.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from jobs.bucket import Bucket
from jobs.errors import BucketError, ConfigError, NotFound
from jobs.http import GROUP_PREFIX
from jobs.publish import Publisher
from jobs.roster import replicas_prefix

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often the bucket is looked at: a replica takes at least 16 s to start, so this adds little."""


class ReplicaSet:
    """Tells `apply` the URLs by engine name, whenever they change. `named` are those of the command line.

    `group_prefix` stands before the aliases of the network group that this process is in.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        publisher: Publisher,
        named: Mapping[str, str],
        apply: Callable[[dict[str, str]], None],
        group_prefix: str | None = None,
    ) -> None:
        self._group_prefix = group_prefix
        self._bucket, self._prefix, self._publisher, self._apply = bucket, replicas_prefix(run), publisher, apply
        self._found: dict[str, str] = {}
        self._named = check(named)
        self._applied: dict[str, str] | None = None

    @property
    def urls(self) -> dict[str, str]:
        """The set as it is now."""
        return {**self._found, **self._named}

    def name(self, urls: Mapping[str, str]) -> None:
        """Replaces the engines that are named by hand.

        Raises:
            ConfigError: one of them is no URL.
        """
        self._named = check(urls)
        self._tell()

    async def run(self) -> None:
        """Looks at the bucket until it is cancelled. While it is away the set stays as it is."""
        self._tell()
        while True:
            try:
                self._found = await self._publisher.in_thread(self._look)
                self._tell()
            except BucketError as error:
                log.warning("the replica set could not be read: %s", error)
            await asyncio.sleep(LOOK_S)

    def _tell(self) -> None:
        if self.urls != self._applied:
            self._applied = self.urls
            self._apply(self.urls)

    def _look(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for key in self._bucket.list(self._prefix):
            try:
                record = json.loads(self._bucket.get(key))
                index, urls = int(record["index"]), [self._in_group(url) for url in record["urls"]]
                found |= check({str(index) if len(urls) == 1 else f"{index}.{n}": url for n, url in enumerate(urls)})
            except NotFound:  # it was deleted meanwhile
                continue
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s is no replica's record: %s", key, error)
        return found

    def _in_group(self, url: str) -> str:
        prefix = f"${{{GROUP_PREFIX}}}"
        if prefix in url and self._group_prefix is None:
            raise ValueError(f"{GROUP_PREFIX} is not set: this process is no member of a network group")
        return url.replace(prefix, self._group_prefix or "")


def check(urls: Mapping[str, str]) -> dict[str, str]:
    """The same URLs, without a slash at the end.

    Raises:
        ConfigError: one of them is none.
    """
    for name, url in urls.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.username or parts.query:
            raise ConfigError(f"replica {name!r}: {url!r} is no URL of a server. Expected http(s)://host[:port].")
    return {name: url.rstrip("/") for name, url in urls.items()}
