"""The Hub's API as the unmodified client sees it: huggingface_hub's HfApi over real sockets, real processes behind."""

import inspect
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from huggingface_hub import HfApi, Volume
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, JobNotFoundError

from emulator import ports, reaper, runner
from emulator.job_environment import Image
from emulator.live_mount import Lag
from emulator.serve import Emulator
from emulator.volumes import in_s3
from jobs.bucket import Bucket

IMAGE = "python:3.12"
FOREVER = ["python", "-S", "-c", "import time; print('up'); time.sleep(600)"]
IGNORES_SIGTERM = ["/bin/sh", "-c", "trap '' TERM; echo up; while true; do sleep 1; done"]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as host:
        # What must never reach a Job: it is set before the emulator starts.
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SECRET_OF_THE_HOST", "PYTHONPATH"):
            host.setenv(name, "host-secret")
        with Emulator(grace_s=0.5, repositories={"model:org/tiny": model}, quota_calls=100_000) as emulator:
            yield emulator
        assert emulator.orphans() == []


@pytest.fixture
def api(emulator):
    emulator.hub.keep_alive_s = 30.0
    emulator.hub.interrupt_logs = None
    emulator.hub.interfere = None
    return HfApi(endpoint=emulator.endpoint, token=emulator.token)


@pytest.fixture
def run(api):
    started = []

    def run(command, **options):
        job = api.run_job(image=IMAGE, command=command, namespace="local", **options)
        started.append(job)
        return job

    yield run
    for job in started:
        api.cancel_job(job_id=job.id, namespace="local")


def ended(api, job, timeout=20):
    return api.wait_for_job(job_id=job.id, namespace="local", poll_interval=0.02, timeout=timeout)


def logs(api, job, **options):
    return list(api.fetch_job_logs(job_id=job.id, namespace="local", follow=True, **options))


def running(api, job):
    return api.wait_for_job(job_id=job.id, namespace="local", stages=["RUNNING"], poll_interval=0.02, timeout=10)


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def first_line(emulator, job):
    """Wait until the Job has printed something, which shows that it has set itself up."""
    state = emulator.runner.table.get("local", job.id)
    eventually(lambda: len(emulator.runner.log(state).read()) >= 2)


def test_an_organisations_namespace(api, emulator):
    (team,) = api.whoami()["orgs"]
    job = api.run_job(image=IMAGE, command=["true"], namespace=team["name"])
    done = api.wait_for_job(job_id=job.id, namespace=team["name"], poll_interval=0.02, timeout=20)
    assert (done.owner.name, done.owner.type, done.status.stage) == ("local-team", "org", "COMPLETED")
    assert [each.id for each in api.list_jobs(namespace=team["name"])] == [job.id]
    assert job.id not in [each.id for each in api.list_jobs(namespace="local")]
    with pytest.raises(JobNotFoundError):
        api.inspect_job(job_id=job.id, namespace="local")
    assert done.initiator.name == "local"
    api.create_bucket("local-team/theirs")
    Bucket(in_s3(emulator.bucket, "local-team/theirs")).put("a", b"1")
    assert [file.path for file in api.list_bucket_tree("local-team/theirs")] == ["a"]
    volume = Volume(type="bucket", source="local-team/theirs", mount_path="/data")
    job = api.run_job(image=IMAGE, command=["cat", "/data/a"], volumes=[volume], namespace=team["name"])
    lines = list(api.fetch_job_logs(job_id=job.id, namespace=team["name"], follow=True))
    assert lines[-1] == "1"


def test_an_account_without_credit(api, emulator, run):
    emulator.hub.affordable = 1 + sum(not job.stage.final for job in emulator.runner.table.all())
    try:
        first = run(FOREVER)
        with pytest.raises(HfHubHTTPError, match="credit balance is insufficient") as refused:
            run(FOREVER)
        assert refused.value.response.status_code == 402
        api.cancel_job(job_id=first.id, namespace="local")
        run(["true"])
    finally:
        emulator.hub.affordable = None


def test_whoami_and_hardware(api):
    assert api.whoami()["name"] == "local"
    prices = {hardware.name: hardware.unit_cost_usd for hardware in api.list_jobs_hardware()}
    assert prices["h200x8"] == pytest.approx(40 / 60, rel=1e-3)


def test_a_job_from_beginning_to_end(api, run):
    job = run(["python", "-c", "import sys; print('out'); print('err', file=sys.stderr); print('last', end='')"])
    assert job.status.stage == "SCHEDULING"
    done = ended(api, job)
    assert (done.status.stage, done.status.message) == ("COMPLETED", None)
    assert done.created_at <= done.started_at <= done.finished_at
    assert done.owner.name == "local" and done.initiator.type == "user"
    assert sorted(logs(api, job)) == ["err", "last", "out"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["python", "-c", "raise SystemExit(7)"], "exit code: 7"),
        (["/bin/sh", "-c", "kill -9 $$"], "exit code: 137"),
        (["no-such-program"], "not found"),
        (["/"], "failed to start"),
    ],
)
def test_failures_say_why(api, run, command, message):
    done = ended(api, run(command))
    assert done.status.stage == "ERROR"
    assert message in done.status.message


def test_the_environment_is_the_jobs_own(api, run):
    code = "import os, json; print(json.dumps(dict(os.environ), indent=1)); print('cwd', os.getcwd())"
    job = run(["python", "-c", code], env={"SET": "by env"}, secrets={"PASSWORD": "hunter2"}, flavor="cpu-upgrade")
    ended(api, job)
    text = "\n".join(logs(api, job))
    assert "host-secret" not in text and "SECRET_OF_THE_HOST" not in text
    for part in ('"SET": "by env"', '"PASSWORD": "hunter2"', f'"JOB_ID": "{job.id}"', '"CPU_CORES": "8"', '"32Gi"'):
        assert part in text


def test_secrets_are_answered_by_name_only(emulator, api, run):
    job = run(FOREVER, secrets={"PASSWORD": "hunter2"})
    headers = {"Authorization": f"Bearer {emulator.token}"}
    base = f"{emulator.endpoint}/api/jobs/local"
    answers = [
        requests.get(base, headers=headers),
        requests.get(f"{base}/{job.id}", headers=headers),
        requests.put(f"{base}/{job.id}/labels", json={"labels": {"a": "b"}}, headers=headers),
        requests.put(f"{base}/{job.id}/expose", json={}, headers=headers),
        again := requests.post(f"{base}/{job.id}/duplicate", headers=headers),
        requests.post(f"{base}/{job.id}/cancel", headers=headers),
    ]
    api.cancel_job(job_id=again.json()["id"], namespace="local")
    for answer in answers:
        assert answer.status_code == 200
        assert "hunter2" not in answer.text
        assert "PASSWORD" in answer.text
        assert "endpoint" not in answer.json()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"flavor": "h900"}, "flavor"),
        ({"command": []}, "command"),
        ({"timeout": -5}, "timeoutSeconds"),
        ({"labels": {"a": "b/c"}}, "labels"),
        ({"network_group": "Not Lower"}, "network.group"),
        ({"network_group": "train", "network_aliases": ["a_b"]}, "network.aliases"),
        ({"volumes": [Volume(type="bucket", source="local/b", mount_path="relative")]}, "mountPath"),
    ],
)
def test_what_is_refused_is_a_bad_request_that_says_why(api, options, named):
    with pytest.raises(BadRequestError, match=named):
        api.run_job(**{"image": IMAGE, "command": ["true"], "namespace": "local", **options})


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-Math-1.5B", "lr 4e-5, run #2", "x" * 130], ids=["model", "run name", "130 characters"]
)
def test_labels_the_hub_would_not_take(api, run, name):
    """Case A22."""
    with pytest.raises(BadRequestError, match="100 characters"):
        api.run_job(image=IMAGE, command=["true"], labels={"asyncgrpo-run": name}, namespace="local")
    with pytest.raises(BadRequestError, match="100 characters"):
        api.run_job(image=IMAGE, command=["true"], name=name, namespace="local")
    job = run(FOREVER)
    with pytest.raises(BadRequestError, match="100 characters"):
        api.update_job_labels(job_id=job.id, labels={"model": name}, namespace="local")
    assert "model" not in api.inspect_job(job_id=job.id, namespace="local").labels


def test_labels_are_replaced(api, run):
    job = run(FOREVER, labels={"a": "1", "b": "2"})
    assert api.update_job_labels(job_id=job.id, labels={"b": "3"}, namespace="local").labels == {"b": "3"}
    assert api.inspect_job(job_id=job.id, namespace="local").labels == {"b": "3"}


def test_who_may_do_what(emulator, api):
    for token, words in ((False, "Invalid username or password"), ("hf_wrong", "Invalid credentials")):
        with pytest.raises(HfHubHTTPError, match=words) as refused:
            list(HfApi(endpoint=emulator.endpoint, token=token).list_jobs(namespace="local"))
        assert refused.value.response.status_code == 401
    with pytest.raises(HfHubHTTPError) as refused:
        api.run_job(image=IMAGE, command=["true"], namespace="somebody-else")
    assert refused.value.response.status_code == 403
    assert list(api.list_jobs(namespace="somebody-else")) == []


def test_unknown_jobs(api):
    for call in (
        lambda: api.inspect_job(job_id="0" * 24, namespace="local"),
        lambda: api.cancel_job(job_id="0" * 24, namespace="local"),
        lambda: api.update_job_labels(job_id="0" * 24, labels={}, namespace="local"),
        lambda: list(api.fetch_job_logs(job_id="0" * 24, namespace="local")),
    ):
        with pytest.raises(JobNotFoundError):
            call()


def test_listing_by_stage_and_labels(api, run):
    mark = str(time.monotonic_ns())
    one = run(FOREVER, labels={"mark": mark, "i": "1"})
    two = run(["true"], labels={"mark": mark, "i": "2"})
    ended(api, two)
    running(api, one)

    def found(**filters):
        return [job.id for job in api.list_jobs(namespace="local", **filters)]

    assert found(labels={"mark": mark}) == [two.id, one.id]
    assert found(labels={"mark": mark, "i": "1"}) == [one.id]
    assert found(labels={"mark": mark}, status="RUNNING") == [one.id]
    assert found(labels={"mark": mark}, status=["RUNNING", "COMPLETED"]) == [two.id, one.id]
    assert found(labels={"mark": mark}, status="CANCELED") == []


def test_fifty_jobs_at_once_and_more_than_a_page(api, run):
    mark = str(time.monotonic_ns())
    began = time.monotonic()
    jobs = [run(["/bin/sh", "-c", f"echo {index}"], labels={"mark": mark}) for index in range(50)]
    assert {ended(api, job).status.stage for job in jobs} == {"COMPLETED"}
    assert time.monotonic() - began < 20  # 0.5 s measured on two quiet cores
    assert [logs(api, job) for job in jobs[::10]] == [["0"], ["10"], ["20"], ["30"], ["40"]]
    for _ in range(55):
        ended(api, run(["true"], labels={"mark": mark}))
    assert len({job.id for job in api.list_jobs(namespace="local", labels={"mark": mark})}) == 105


def test_cancel_is_sigterm_then_sigkill(emulator, api, run):
    gentle = run(["/bin/sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while true; do sleep 0.05; done"])
    stubborn = run(IGNORES_SIGTERM)
    for job in (gentle, stubborn):
        first_line(emulator, job)
        api.cancel_job(job_id=job.id, namespace="local")
        assert api.inspect_job(job_id=job.id, namespace="local").status.stage == "CANCELED"
        eventually(lambda job=job: not emulator.pids(job.id))
    assert logs(api, gentle) == ["up", "bye"]
    assert logs(api, stubborn) == ["up"]
    assert ended(api, gentle).status.stage == "CANCELED"  # its exit code 0 changes nothing


def test_children_go_with_their_job_also_those_that_left_its_group(emulator, api, run):
    child = f"import subprocess, sys; subprocess.Popen({FOREVER!r}, start_new_session=True); print('started')"
    job = run([sys.executable, "-c", child.replace("'python'", "sys.executable")])
    assert ended(api, job).status.stage == "COMPLETED"
    assert reaper.marked(job.id, "JOB_ID") == []
    assert logs(api, job)[0] == "started"


def test_time_out(api, run):
    began = time.monotonic()
    done = ended(api, run(FOREVER, timeout=1))
    assert (done.status.stage, done.status.message) == ("ERROR", "Job timeout")
    assert 1 <= time.monotonic() - began < 5


def test_attempts(emulator, api):
    body = {
        "command": ["/bin/sh", "-c", "echo try; test -e there || { touch there; exit 1; }"],
        "dockerImage": IMAGE,
        "attempts": 3,
    }
    headers = {"Authorization": f"Bearer {emulator.token}"}
    created = requests.post(f"{emulator.endpoint}/api/jobs/local", json=body, headers=headers).json()
    assert created["retry"] == 2
    done = api.wait_for_job(job_id=created["id"], namespace="local", poll_interval=0.02, timeout=10)
    assert done.status.stage == "COMPLETED"
    assert logs(api, done) == ["try", "try"]


def test_a_machine_that_hangs_and_comes_back(emulator, api, run):
    """The children in groups of their own hang with it."""
    ticks = "import time\nwhile True: print('tick', flush=True); time.sleep(0.02)"
    command = f"[sys.executable, '-S', '-c', {ticks!r}]"
    child = f"import subprocess, sys; subprocess.Popen({command}, start_new_session=True).wait()"
    job = run(["python", "-S", "-c", child])
    first_line(emulator, job)
    pids = emulator.pids(job.id)
    assert len(pids) == 2
    emulator.signal(job.id, signal.SIGSTOP)
    eventually(lambda: all("T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in pids))
    emulator.signal(job.id, signal.SIGCONT)
    log = emulator.runner.log(emulator.runner.table.get("local", job.id))
    before = len(log.read())
    eventually(lambda: len(log.read()) > before + 2)


def test_a_machine_that_dies(emulator, api, run):
    job = run(FOREVER)
    first_line(emulator, job)
    emulator.signal(job.id, signal.SIGKILL)
    done = ended(api, job)
    assert (done.status.stage, done.status.message) == ("ERROR", "Job failed with exit code: 137. Reason: Error")


def test_duplicate_has_the_same_specification(emulator, api, run):
    job = run(["python", "-c", "import os; print(os.environ['S'])"], secrets={"S": "same"}, labels={"a": "b"})
    ended(api, job)
    headers = {"Authorization": f"Bearer {emulator.token}"}
    again = requests.post(f"{emulator.endpoint}/api/jobs/local/{job.id}/duplicate", headers=headers).json()
    assert again["id"] != job.id
    assert again["labels"]["a"] == "b"
    assert again["initiator"]["type"] == "duplicated-job"
    done = api.wait_for_job(job_id=again["id"], namespace="local", poll_interval=0.02, timeout=10)
    assert logs(api, done) == ["same"]


# Logs, case A21


def test_logs_follow_a_job_that_is_silent(emulator, api, run):
    emulator.hub.keep_alive_s = 0.1
    job = run(["/bin/sh", "-c", "echo one; sleep 1; echo two"])
    running(api, job)
    assert logs(api, job) == ["one", "two"]


def test_logs_without_follow_end_although_the_job_does_not(emulator, api, run):
    job = run(FOREVER)
    first_line(emulator, job)
    began = time.monotonic()
    assert list(api.fetch_job_logs(job_id=job.id, namespace="local")) == ["up"]
    assert time.monotonic() - began < 8  # the client leaves after 5 s of silence: the next keep-alive is 30 s away


def test_logs_dropped_in_the_middle_of_a_line_are_neither_lost_nor_shown_twice(emulator, api, run):
    script = "for i in 0 1 2 3 4 5 6 7 8 9; do echo line-$i; done; while ! test -e go; do sleep 0.05; done; echo end"
    job = run(["/bin/sh", "-c", script])
    first_line(emulator, job)
    drops = []

    def interrupt(job_id, sent):
        if sent == 4 and not drops:
            drops.append(job_id)
            return "drop"
        if sent == 11:
            (emulator.root / job_id / "work" / "go").touch()
        return None

    emulator.hub.interrupt_logs = interrupt
    assert logs(api, job) == [f"line-{index}" for index in range(10)] + ["end"]
    assert drops == [job.id]


def test_a_log_stream_may_end_before_its_job(emulator, api, run):
    job = run(FOREVER)
    first_line(emulator, job)
    emulator.hub.interrupt_logs = lambda job_id, sent: "end" if sent == 2 else None
    response = requests.get(
        f"{emulator.endpoint}/api/jobs/local/{job.id}/logs",
        headers={"Authorization": f"Bearer {emulator.token}"},
        timeout=5,
    )
    assert response.text.count("data:") == 2
    assert "===== Job started" in response.text
    assert api.inspect_job(job_id=job.id, namespace="local").status.stage == "RUNNING"


def test_tail(emulator, api, run):
    job = run(["/bin/sh", "-c", "echo 1; echo 2; echo 3"])
    ended(api, job)
    assert logs(api, job, tail=2) == ["2", "3"]


def test_metrics_are_measured_and_end_with_the_job(emulator, api, run):
    job = run(["python", "-S", "-c", "data = b'x' * 50_000_000\nprint('up', flush=True)\nwhile True: pass"])
    first_line(emulator, job)
    seen = []
    # 2.x of the client asks for one event unless told to follow, 1.x always follows.
    follow = {"follow": True} if "follow" in inspect.signature(api.fetch_job_metrics).parameters else {}
    for event in api.fetch_job_metrics(job_id=job.id, namespace="local", **follow):
        seen.append(event)
        if len(seen) == 2:
            api.cancel_job(job_id=job.id, namespace="local")
    assert seen[1]["memory_used_bytes"] > 50_000_000
    assert seen[1]["cpu_usage_pct"] > 10
    answer = requests.get(
        f"{emulator.endpoint}/api/jobs/local/{job.id}/metrics", headers={"Authorization": f"Bearer {emulator.token}"}
    )
    assert answer.status_code == 406


# Exposed ports

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = os.environ["ANSWER"].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
host, port = os.environ.get("ASYNCGRPO_BIND_8000", "127.0.0.1:8000").split(":")
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


def get(url, token):
    return requests.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=5)


@pytest.fixture(params=["own ports", "ports replaced"])
def ways(request, emulator, monkeypatch):
    """Both ways to give each Job its ports: where the machine allows what it takes, and elsewhere."""
    if request.param == "own ports":
        request.getfixturevalue("groups")
    else:
        monkeypatch.setattr(emulator.runner.network, "missing", lambda directory: "asked to do without")


@pytest.mark.usefixtures("ways")
def test_two_jobs_expose_the_same_port(emulator, api, run):
    jobs = [run(["python", "-S", "-c", SERVER], expose=[8000], env={"ANSWER": word}) for word in ("one", "two")]
    urls = [job.status.expose_urls[0] for job in jobs]
    assert len(set(urls)) == 2
    for url, word in zip(urls, ("one", "two"), strict=True):
        assert requests.get(url, timeout=5).status_code == 401
        assert get(url, "hf_wrong").status_code == 401
        eventually(lambda url=url: get(url, emulator.token).status_code == 200)
        assert get(url, emulator.token).text == word
    api.cancel_job(job_id=jobs[0].id, namespace="local")
    eventually(lambda: get(urls[0], emulator.token).status_code == 503)
    assert get(urls[1], emulator.token).text == "two"


def test_two_programs_that_listen_on_their_default_port(emulator, run, groups):
    """As `vllm serve MODEL` does: no word of 8000 but in what is exposed."""
    code = "from http import server; server.test(port=1000 * 8, HandlerClass=server.%s)"
    handlers = {"SimpleHTTPRequestHandler": 200, "BaseHTTPRequestHandler": 501}
    jobs = [run(["python", "-S", "-c", code % handler], expose=[8000]) for handler in handlers]
    for job, status in zip(jobs, handlers.values(), strict=True):
        url = job.status.expose_urls[0]
        assert eventually(lambda url=url: (code := get(url, emulator.token).status_code) != 503 and code) == status


@pytest.mark.usefixtures("ways")
def test_a_program_that_does_not_know_the_agreement_is_found(emulator, run):
    port = ports.free_port()
    listen = f"python -m http.server $(({port - 1} + 1)) --bind 127.0.0.1"
    job = run(["/bin/sh", "-c", listen], expose=[port])
    eventually(lambda: get(job.status.expose_urls[0], emulator.token).status_code == 200)


def test_ports_are_opened_and_closed_while_it_runs(emulator, run):
    job = run(["python", "-S", "-c", SERVER], expose=[8000], env={"ANSWER": "x"})
    url = job.status.expose_urls[0]
    eventually(lambda: get(url, emulator.token).status_code == 200)
    path = f"{emulator.endpoint}/api/jobs/local/{job.id}/expose"
    headers = {"Authorization": f"Bearer {emulator.token}"}
    answer = requests.put(path, json={"ports": [8000], "portsPublic": [8000]}, headers=headers).json()
    assert answer["expose"] == {"ports": [8000], "portsPublic": [8000]}
    assert requests.get(url, timeout=5).status_code == 200
    assert requests.put(path, json={"ports": [], "portsPublic": []}, headers=headers).status_code == 200
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=5)
    assert requests.put(path, json={"ports": [1], "portsPublic": [2]}, headers=headers).status_code == 400


# Volumes


def test_volumes(emulator, api, run):
    bucket = Bucket(emulator.bucket)
    bucket.put("in/a/b.txt", b"from the bucket")
    bucket.put("elsewhere/c.txt", b"not mounted")
    bucket.put("in/gone.txt", b"x")
    script = (
        "cat /data/a/b.txt && cat /model/config.json && ls /data /ro && rm /data/gone.txt"
        " && mkdir -p /data/out && echo -n result > /data/out/r.txt; (echo lost > /ro/lost.txt); true"
    )
    job = run(
        ["/bin/sh", "-c", script],
        volumes=[
            Volume(type="bucket", source="local/asyncgrpo", mount_path="/data", path="in"),
            Volume(type="bucket", source="local/asyncgrpo", mount_path="/ro", path="elsewhere", read_only=True),
            Volume(type="model", source="org/tiny", mount_path="/model"),
        ],
    )
    done = ended(api, job)
    assert done.status.stage == "COMPLETED", (done.status.message, logs(api, job))
    assert "from the bucket{}" in logs(api, job)[0]
    assert bucket.list("in/") == ["in/a/b.txt", "in/out/r.txt"]
    assert bucket.get("in/out/r.txt") == b"result"
    assert bucket.list("elsewhere/") == ["elsewhere/c.txt"]


def test_a_mounted_bucket_follows_what_others_write():
    with Emulator(grace_s=0.5, lag=Lag(0.1, 0)) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        bucket = Bucket(emulator.bucket)
        wait = "while ! test -s {0}; do sleep 0.05; done; cat {0}; echo"
        command = ["/bin/sh", "-c", f"{wait.format('/data/v1/a')}; echo answer > /data/answer; sleep 600"]
        volume = Volume(type="bucket", source="local/asyncgrpo", mount_path="/data")
        job = api.run_job(image=IMAGE, command=command, volumes=[volume], namespace="local")
        running(api, job)
        bucket.put("v1/a", b"published later")
        eventually(lambda: bucket.list("answer") == ["answer"])
        api.cancel_job(job_id=job.id, namespace="local")
        ended(api, job)
        log = emulator.runner.log(emulator.runner.table.get("local", job.id)).read()
        assert log[-1]["data"] == "published later"


@pytest.mark.parametrize(("trap", "left"), [("exit 0", ["answer"]), ("", [])])
def test_what_a_killed_job_had_not_uploaded_is_lost(api, emulator, monkeypatch, trap, left):
    monkeypatch.setattr(runner, "MOUNT_POLL_S", 600)
    command = [
        "/bin/sh",
        "-c",
        f"trap '{trap}' TERM; echo answer > /data/answer; echo up; while :; do sleep 0.05; done",
    ]
    Bucket(emulator.bucket).put("out/before", b"")
    volume = Volume(type="bucket", source="local/asyncgrpo", mount_path="/data", path="out")
    job = api.run_job(image=IMAGE, command=command, volumes=[volume], namespace="local")
    assert "up" in next(iter(api.fetch_job_logs(job_id=job.id, namespace="local", follow=True)))
    api.cancel_job(job_id=job.id, namespace="local")
    eventually(lambda: not (emulator.root / job.id).exists())
    bucket = Bucket(replace(emulator.bucket, url=f"{emulator.bucket.url}/out"))
    assert bucket.list("") == sorted(["before", *left])
    bucket.delete(bucket.list(""))


@pytest.mark.parametrize(
    "volume",
    [
        Volume(type="bucket", source="local/asyncgrpo", mount_path="/data", path="no/such/folder"),
        Volume(type="bucket", source="local/no-such-bucket", mount_path="/data"),
        Volume(type="model", source="org/unknown", mount_path="/data"),
    ],
)
def test_a_volume_that_does_not_exist_fails_the_job(api, run, volume):
    done = ended(api, run(["true"], volumes=[volume]))
    assert done.status.stage == "ERROR"
    assert "failed to start" in done.status.message


# Places, faults, quota


def test_jobs_wait_for_devices():
    with Emulator(devices=["4", "6"], grace_s=0.2) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)

        def start(flavor, command=FOREVER):
            return api.run_job(image=IMAGE, command=command, flavor=flavor, namespace="local")

        show = ["/bin/sh", "-c", "echo devices=$CUDA_VISIBLE_DEVICES; sleep 600"]
        one, two, late = start("h200", show), start("h200", show), start("h200x2", show)
        for job, devices in ((one, "4"), (two, "6")):
            first_line(emulator, job)
            log = emulator.runner.log(emulator.runner.table.get("local", job.id))
            assert log.read()[-1]["data"] == f"devices={devices}"
        assert running(api, two).status.stage == "RUNNING"
        waiting = api.inspect_job(job_id=late.id, namespace="local")
        assert (waiting.status.stage, waiting.status.message) == ("SCHEDULING", "Waiting for hardware")
        assert waiting.started_at is None
        running(api, start("cpu-basic"))  # another kind of place
        with pytest.raises(BadRequestError, match="4 GPUs"):
            start("h200x4")
        api.cancel_job(job_id=one.id, namespace="local")
        assert api.inspect_job(job_id=late.id, namespace="local").status.stage == "SCHEDULING"
        api.cancel_job(job_id=two.id, namespace="local")
        running(api, late)


def test_a_job_that_waits_can_be_cancelled():
    with Emulator(cpu_jobs=1, grace_s=0.2) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        first = api.run_job(image=IMAGE, command=FOREVER, namespace="local")
        second = api.run_job(image=IMAGE, command=FOREVER, namespace="local")
        third = api.run_job(image=IMAGE, command=["true"], namespace="local")
        running(api, first)
        api.cancel_job(job_id=second.id, namespace="local")
        done = ended(api, second)
        assert (done.status.stage, done.started_at) == ("CANCELED", None)
        api.cancel_job(job_id=first.id, namespace="local")
        assert ended(api, third).status.stage == "COMPLETED"


def test_a_job_can_have_been_created_although_the_hub_answered_500(emulator, api):
    mark = str(time.monotonic_ns())
    emulator.hub.interfere = lambda method, path: 500 if method == "POST" else None
    with pytest.raises(HfHubHTTPError, match="500"):
        api.run_job(image=IMAGE, command=["true"], labels={"mark": mark}, namespace="local")
    assert len(list(api.list_jobs(namespace="local", labels={"mark": mark}))) == 1


def test_the_quota_is_the_hubs():
    with Emulator(quota_calls=5) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        for _ in range(5):
            api.whoami()
        with pytest.raises(HfHubHTTPError, match="429"):
            api.inspect_job(job_id="0" * 24, namespace="local")


def test_images_without_a_stand_in():
    with Emulator(images={"python:*": Image()}) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        with pytest.raises(BadRequestError, match="ubuntu"):
            api.run_job(image="ubuntu", command=["true"], namespace="local")
