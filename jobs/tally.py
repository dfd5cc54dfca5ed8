"""What a run's proxies counted: each process counts from zero, and each attempt has others, so they add up. Pure.

A proxy that is killed leaves its counts of completions and decisions in a file (`jobs.counters`); what waited and where
tokens went is as its status last said. A killed trainer leaves what it last told the bucket, about a second before
(`jobs.trainer.STATUS_S`). The adapters of an attempt are all known to its next proxy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Tally:
    """Counts under their names in `summary.json`; `affinity`, `cold` and `spilled` are numbers of `decisions` here."""

    rollouts: int = 0
    rollouts_lost: int = 0
    rollouts_redispatched: int = 0
    parked: int = 0
    parked_s: float = 0.0
    generation_stall_s: float = 0.0
    adapters_published: int = 0
    adapter_bytes: int = 0
    replica_deaths: int = 0
    replica_rejoins: int = 0
    decisions: int = 0
    affinity: float = 0.0
    cold: float = 0.0
    spilled: float = 0.0
    replica_tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> "Tally":
        """What a proxy has counted according to its status; zeros for an empty one."""
        completions, routing = status.get("completions") or {}, status.get("routing") or {}
        replicas = status.get("replicas") or []
        decisions = routing.get("decisions") or 0
        return cls(
            rollouts=completions.get("asked", 0),
            rollouts_lost=completions.get("lost", 0),
            rollouts_redispatched=completions.get("redispatched", 0),
            parked=completions.get("parked_total", 0),
            parked_s=completions.get("parked_s", 0.0),
            generation_stall_s=status.get("generation_stall_s", 0.0),
            adapters_published=status.get("adapters_published", 0),
            adapter_bytes=status.get("adapter_bytes", 0),
            replica_deaths=sum(replica.get("deaths") or 0 for replica in replicas),
            replica_rejoins=sum(replica.get("rejoins") or 0 for replica in replicas),
            decisions=decisions,
            **{kind: (routing.get(kind) or 0.0) * decisions for kind in ("affinity", "cold", "spilled")},
            replica_tokens=dict(routing.get("tokens") or {}),
        )

    @classmethod
    def of_ended(cls, status: Mapping[str, Any]) -> "Tally":
        """The same of a proxy that has ended: what was in flight is asked again, so it does not count here."""
        tally = cls.of(status)
        in_flight = (status.get("completions") or {}).get("in_flight", 0)
        return replace(tally, rollouts=tally.rollouts - in_flight)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Tally":
        """Reads `to_dict`'s result back."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __add__(self, other: "Tally") -> "Tally":
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)[:-1]}
        return Tally(**sums, replica_tokens=dict(Counter(self.replica_tokens) + Counter(other.replica_tokens)))

    def without_adapters(self) -> "Tally":
        """The same less the adapters, which the next proxy of the same attempt counts again."""
        return replace(self, adapters_published=0, adapter_bytes=0)
