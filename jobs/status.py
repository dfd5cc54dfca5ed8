"""What the proxy tells of itself: GET /asyncgrpo/status as JSON, and /metrics for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jobs.bucket import Bucket
from jobs.engine import Engine
from jobs.names import parse_wire
from jobs.pool import FleetPool
from jobs.publish import Publisher
from jobs.version import ACTIVE, Version

PAST_VERSIONS = 8
"""How many versions that are over the status still shows, so that it stays small however long the run."""


def status(
    pool: FleetPool, publisher: Publisher, bucket: Bucket, snapshot: Mapping[str, Any], boot_id: str
) -> dict[str, Any]:
    """The status. `snapshot` is `Completions.snapshot()`, whose counts of completions, routing and engines go in."""
    fleet = pool.fleet
    traffic: Mapping[str, Mapping[str, Any]] = snapshot["engines"]
    current = [version for version in fleet.versions.values() if version.state in ACTIVE]
    past = [version for version in fleet.versions.values() if version.state not in ACTIVE][-PAST_VERSIONS:]
    return {
        "run": fleet.run,
        "attempt": fleet.attempt,
        "boot_id": boot_id,
        "fatal": fleet.fatal,
        "versions": [_version(pool, publisher, v) for v in sorted(past + current, key=lambda v: v.order)],
        "replicas": [_engine(engine, traffic.get(name, {})) for name, engine in fleet.engines.items()],
        "completions": dict(snapshot["completions"]),
        "routing": dict(snapshot["routing"]),
        "generation_stall_s": fleet.generation_stall_s,
        "adapters_published": publisher.count,
        "adapter_bytes": publisher.bytes,
        "bucket_throttled": bucket.throttled,
    }


def _version(pool: FleetPool, publisher: Publisher, version: Version) -> dict[str, Any]:
    name, published = parse_wire(version.wire), publisher.versions.get(version.wire)
    parked = version.in_flight if version.in_flight and not pool.candidates(version.wire) else 0
    return {
        "version": name.version if name else None,
        "wire": version.wire,
        "state": version.state,
        "reason": version.words,
        "digest": version.digest,
        "bytes": published.manifest.size if published else None,
        "zero": published.manifest.zero if published else None,
        "publish_s": published.publish_s if published else None,
        "in_flight": version.in_flight,
        "parked": parked,
    }


def _engine(engine: Engine, traffic: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {wire: name.version for wire in engine.holdings if (name := parse_wire(wire))}
    held = {numbers[wire]: holding for wire, holding in engine.holdings.items() if wire in numbers}
    return {
        "name": engine.name,
        "url": engine.url,
        "state": engine.state,
        "reason": engine.reason,
        "in_flight": traffic.get("in_flight", 0),
        "outstanding_tokens": traffic.get("outstanding_tokens", 0),
        "adapters": sorted(number for number, holding in held.items() if holding.proved),
        "load_s": {str(number): h.load_s for number, h in held.items() if h.load_s is not None},
        "load_attempts": {str(number): h.attempts for number, h in held.items() if h.attempts},
        "completions": traffic.get("completions", 0),
        "tokens": traffic.get("tokens", 0),
        "deaths": engine.deaths,
        "rejoins": engine.rejoins,
    }


class Metrics(Collector):
    """The status as Prometheus metrics, read at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing is asked of the fleet while registering."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        now = self._read()
        completions = now["completions"]
        yield _gauge("fatal", "1 when no replica can serve a version that was acknowledged", now["fatal"] is not None)
        for name in ("in_flight", "parked"):
            yield _gauge(f"completions_{name}", f"Completions {name.replace('_', ' ')}", completions[name])
        for name in ("asked", "answered", "lost", "redispatched", "cancelled", "upstream_retries"):
            yield _counter(f"completions_{name}", f"Completions {name.replace('_', ' ')}", completions[name])
        yield _counter("completions_parked", "Completions that had to wait", completions["parked_total"])
        yield _counter("parked_seconds", "Seconds for which completions waited", completions["parked_s"])
        yield _counter("generation_stall_seconds", "Seconds a ready engine was kept idle", now["generation_stall_s"])
        yield _counter("adapters_published", "Adapter versions published", now["adapters_published"])
        yield _counter("adapter_bytes", "Bytes of adapters published", now["adapter_bytes"])
        yield _counter(
            "bucket_throttled", "Answers of the bucket that asked for a slower pace", now["bucket_throttled"]
        )
        yield from _engines(now["replicas"])
        versions = GaugeMetricFamily("asyncgrpo_versions", "Versions by state", labels=["state"])
        states = [version["state"] for version in now["versions"]]
        for state in ACTIVE:
            versions.add_metric([state], states.count(state))
        yield versions


def _engines(engines: list[Mapping[str, Any]]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("asyncgrpo_replica_ready", "1 when the replica gets completions", labels=["replica"])
    for engine in engines:
        ready.add_metric([engine["name"]], engine["state"] == "ready")
    yield ready
    for field in ("in_flight", "outstanding_tokens"):
        gauge = GaugeMetricFamily(f"asyncgrpo_replica_{field}", f"{field} of a replica", labels=["replica"])
        for engine in engines:
            gauge.add_metric([engine["name"]], engine[field])
        yield gauge
    for field in ("completions", "tokens", "deaths", "rejoins"):
        counter = CounterMetricFamily(f"asyncgrpo_replica_{field}", f"{field} of a replica", labels=["replica"])
        for engine in engines:
            counter.add_metric([engine["name"]], engine[field])
        yield counter


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"asyncgrpo_{name}", words, value=float(value))


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"asyncgrpo_{name}", words, value=float(value))
