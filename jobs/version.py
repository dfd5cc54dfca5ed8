"""One adapter version as the fleet knows it. Data only; the rules are in `jobs.fleet`."""

from dataclasses import dataclass
from enum import StrEnum

from jobs.errors import AsyncgrpoError


class VersionState(StrEnum):
    """Where a version stands. Completions are answered under `LIVE` and, until the last one is, `RETIRING`."""

    PUBLISHING = "publishing"  # on its way to the bucket, or not yet loaded as far as `ack` demands
    LIVE = "live"
    RETIRING = "retiring"  # unloaded by the trainer, completions under it are still to be answered
    RETIRED = "retired"
    FAILED = "failed"


ACTIVE = (VersionState.PUBLISHING, VersionState.LIVE, VersionState.RETIRING)
"""States in which engines may have something to do for a version."""

REMEMBERED_VERSIONS = 64
"""How many of the newest versions that are over stay known, and how many a restarted proxy reads back. TRL names at
most max_staleness + 2 (default 6); what is done for each known one is done ten times a second."""


class Ack(StrEnum):
    """When a load is acknowledged to the trainer."""

    PUBLISHED = "published"  # durable in the bucket and valid
    FIRST = "first"  # and one ready engine serves it
    ALL = "all"  # and every ready engine serves it


class VersionRefused(AsyncgrpoError, ValueError):
    """A publish that cannot be taken: the name stands for another adapter, or every adapter slot is taken."""


@dataclass
class Version:
    """One adapter version. `order` counts publishes; `in_flight` counts completions under it, parked ones included."""

    wire: str
    digest: str
    order: int
    state: VersionState = VersionState.PUBLISHING
    published: bool = False
    deadline: float | None = None
    words: str | None = None  # why it failed
    in_flight: int = 0
    recovered: bool = False  # published by an earlier process of this proxy
