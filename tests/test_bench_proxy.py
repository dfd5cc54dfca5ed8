"""`asyncgrpo bench proxy` measures what it says; the figures themselves are for a quiet machine."""

import json

import pytest

from jobs import bench_proxy


def test_a_short_comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_proxy, "REQUESTS", 400)
    monkeypatch.setattr(bench_proxy, "RATE_REQUESTS", 100)
    monkeypatch.setattr(bench_proxy, "IN_FLIGHT", 32)
    bench_proxy.main(as_json=True, rounds=1)
    table = json.loads(capsys.readouterr().out)
    assert {"asyncgrpo", "plain aiohttp", "direct"} <= set(table)
    for figures in table.values():
        assert figures["errors"] == 0
        assert figures["requests_per_s"] > 0
        assert figures["p99_ms"] >= figures["p50_ms"] > 0
