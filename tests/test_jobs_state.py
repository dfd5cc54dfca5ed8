import dataclasses

import pytest
from huggingface_hub import JobInfo
from hypothesis import given
from hypothesis import strategies as st

from emulator.hardware import FLAVORS
from emulator.jobs_state import (
    BadRequest,
    Expose,
    JobTable,
    Owner,
    Stage,
    UnknownJob,
    Volume,
    parse_expose,
    parse_labels,
    parse_spec,
)

ME = Owner("me", "1" * 24)
LEAST = {"command": ["true"], "dockerImage": "python:3.12"}


def test_least_specification_gets_the_hubs_defaults():
    spec = parse_spec(LEAST)
    assert spec.flavor.name == "cpu-basic"
    assert spec.timeout_s == 1800
    assert spec.attempts == 1
    assert spec.labels == {}


def test_every_field_arrives():
    spec = parse_spec(
        {
            "command": ["python", "x.py"],
            "arguments": ["--a"],
            "environment": {"A": "1", "N": 2},
            "secrets": {"S": "secret"},
            "flavor": "h200x2",
            "spaceId": "me/space",
            "timeoutSeconds": 60,
            "attempts": 3,
            "labels": {"k": "v", "empty": ""},
            "name": "fine",
            "volumes": [{"type": "bucket", "source": "me/b", "mountPath": "/data/", "path": "sub", "readOnly": True}],
            "expose": {"ports": [8000, 9000], "portsPublic": [9000]},
            "network": {"group": "train", "aliases": ["a"]},
            "ssh": {"enabled": True},
            "resourceGroupId": "group",
        }
    )
    assert (spec.command, spec.arguments) == (("python", "x.py"), ("--a",))
    assert spec.environment == {"A": "1", "N": "2"}
    assert (spec.flavor.gpus, spec.timeout_s, spec.attempts, spec.ssh) == (2, 60, 3, True)
    assert spec.labels == {"k": "v", "empty": "", "name": "fine"}
    assert spec.volumes == (Volume("bucket", "me/b", "/data", None, True, "sub"),)
    assert spec.expose == Expose((8000, 9000), (9000,))
    assert spec.network == {"group": "train", "aliases": ["a"]}
    assert spec.image == "hf.co/spaces/me/space"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"command": []}, "command"),
        ({"command": "python"}, "command"),
        ({"command": [1]}, "command"),
        ({"arguments": {}, "command": []}, "command"),
        ({"dockerImage": None}, "dockerImage"),
        ({"spaceId": "a/b"}, "spaceId"),
        ({"flavor": "h900"}, "flavor"),
        ({"timeoutSeconds": 0}, "timeoutSeconds"),
        ({"timeoutSeconds": "5m"}, "timeoutSeconds"),
        ({"timeoutSeconds": 1.5}, "timeoutSeconds"),
        ({"attempts": 0}, "attempts"),
        ({"attempts": True}, "attempts"),
        ({"labels": {"a.b": "1"}}, "a.b"),
        ({"labels": {"model": "Qwen/Qwen2.5-Math-1.5B"}}, "model"),
        ({"labels": {"a": "x" * 101}}, "100"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": ["a"]}, "labels"),
        ({"name": "lr 4e-5, run #2"}, "name"),
        ({"environment": {"A B": "1"}}, "A B"),
        ({"environment": {"A": None}}, "environment.A"),
        ({"environment": {"A": "1"}, "secrets": {"A": "2"}}, "secrets"),
        ({"expose": {"ports": [0]}}, "expose.ports"),
        ({"expose": {"ports": [70000]}}, "expose.ports"),
        ({"expose": {"ports": [8000, 8000]}}, "duplicates"),
        ({"expose": {"ports": [1], "portsPublic": [2]}}, "portsPublic"),
        ({"volumes": [{"type": "disk", "source": "a", "mountPath": "/a"}]}, "type"),
        ({"volumes": [{"type": "bucket", "source": "a/b", "mountPath": "a"}]}, "mountPath"),
        ({"volumes": [{"type": "bucket", "source": "a/b", "mountPath": "/"}]}, "mountPath"),
        ({"volumes": [{"type": "bucket", "source": "a/b", "mountPath": "/a/../.."}]}, "mountPath"),
        ({"volumes": [{"type": "bucket", "source": "a/b", "mountPath": "/a", "path": "../b"}]}, "path"),
        ({"volumes": [{"type": "bucket", "source": "a/b", "mountPath": "/a"}] * 2}, "unique"),
        ({"network": {"group": "Train"}}, "network.group"),
        ({"network": {"group": "train", "aliases": ["a_b"]}}, "network.aliases"),
    ],
)
def test_what_the_hub_refuses(change, named):
    with pytest.raises(BadRequest, match=named):
        parse_spec({**LEAST, **change})


def test_a_refusal_never_shows_a_secret():
    with pytest.raises(BadRequest) as refused:
        parse_spec({**LEAST, "secrets": {"S": ["hunter2"]}})
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(parse_spec({**LEAST, "secrets": {"S": "hunter2"}}))


@given(st.dictionaries(st.text(max_size=120), st.text(max_size=120), max_size=3))
def test_labels_are_kept_as_they_are_or_refused(labels):
    try:
        assert parse_labels(labels) == labels
    except BadRequest:
        return
    for text in (*labels, *labels.values()):
        assert len(text) <= 100
        assert all(c.isascii() and (c.isalnum() or c in "-_") for c in text)


def test_expose_nothing():
    assert parse_expose(None) == parse_expose({}) == Expose()


def test_answer_is_what_the_client_takes_and_holds_no_secret():
    table = JobTable()
    job = table.create(ME, ME, parse_spec({**LEAST, "secrets": {"S": "hunter2"}, "expose": {"ports": [1]}}))
    answer = job.to_json()
    assert "endpoint" not in answer
    assert "hunter2" not in str(answer)
    info = JobInfo(**answer, endpoint="http://hub")
    assert info.id == job.id and len(job.id) == 24
    assert list(info.secrets) == ["S"]
    assert info.status.stage == "SCHEDULING"
    assert info.status.expose_urls is None


def test_stages_and_durations():
    job = JobTable().create(ME, ME, parse_spec(LEAST))
    assert job.to_json()["durations"] == {"schedulingSecs": None, "runningSecs": None, "totalSecs": 0}
    job.start()
    first = job.started
    job.start()  # a second attempt
    assert job.started == first
    job.finish(Stage.ERROR, "bad")
    job.finish(Stage.COMPLETED)
    assert (job.stage, job.message) == (Stage.ERROR, "bad")
    assert job.to_json()["finishedAt"].endswith("Z")
    job.start()
    assert job.stage is Stage.ERROR


def test_listing_filters_and_keeps_namespaces_apart():
    table = JobTable()
    jobs = [table.create(ME, ME, parse_spec({**LEAST, "labels": {"i": str(i % 2), "all": "x"}})) for i in range(4)]
    other = table.create(Owner("you", "2" * 24), ME, parse_spec(LEAST))
    jobs[1].finish(Stage.CANCELED)
    assert table.list("me") == jobs[::-1]
    assert table.list("me", ["CANCELED", "RUNNING"]) == [jobs[1]]
    assert table.list("me", labels={"i": "1", "all": "x"}) == [jobs[3], jobs[1]]
    assert table.list("me", ["SCHEDULING"], {"i": "1"}) == [jobs[3]]
    for namespace, job_id in (("me", other.id), ("you", jobs[0].id), ("me", "0" * 24)):
        with pytest.raises(UnknownJob):
            table.get(namespace, job_id)


def test_hardware_is_what_the_client_knows():
    from huggingface_hub import JobHardware, JobHardwareInfo

    assert {flavor.value for flavor in JobHardware} == set(FLAVORS)
    prices = {name: flavor.usd_per_hour for name, flavor in FLAVORS.items()}
    assert (prices["cpu-basic"], prices["h200"], prices["h200x8"]) == (0.01, 5, 40)
    info = JobHardwareInfo(**FLAVORS["h200x8"].to_json())
    assert info.accelerator.quantity == "8"
    assert info.unit_cost_usd * 60 == pytest.approx(40, rel=1e-3)


def test_volume_says_only_what_was_said():
    fields = {field.name for field in dataclasses.fields(Volume)}
    assert fields == {"type", "source", "mount_path", "revision", "read_only", "path"}
    assert Volume("model", "a/b", "/m").to_json() == {"type": "model", "source": "a/b", "mountPath": "/m"}
    assert not Volume("model", "a/b", "/m").writable
    assert Volume("bucket", "a/b", "/m").writable
