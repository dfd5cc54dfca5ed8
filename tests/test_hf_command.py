"""The real `hf` command against the stand-in, as a user types it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi

import asyncgrpo
from emulator.serve import Emulator
from jobs.bucket import Bucket

HF = str(Path(sys.executable).with_name("hf"))
FOREVER = ["python", "-S", "-c", "import time; print('up'); time.sleep(600)"]


@pytest.fixture(scope="module")
def emulator():
    with Emulator(grace_s=0.5) as emulator:
        yield emulator


@pytest.fixture
def hf(emulator, tmp_path):
    def hf(*words, fails=False, **variables):
        home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "NO_COLOR": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        done = subprocess.run(
            [HF, "jobs", *words],
            env={**home, **emulator.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return hf


def start(hf, *words):
    return re.search(r"id: ([0-9a-f]{24})", hf("run", "--detach", *words)).group(1)


def test_run_follows_the_log_to_the_end(hf):
    code = "import os; print(6 * 7, os.environ['KEY'][::-1])"
    text = hf("run", "--secrets", "KEY=hunter2", "python:3.12", "python", "-c", code)
    assert "42 2retnuh" in text
    assert "completed" in text


def test_run_reports_a_failure(hf):
    text = hf("run", "python:3.12", "python", "-c", "print('bad'); raise SystemExit(3)", fails=True)
    assert "bad" in text and "exit code: 3" in text


def test_a_job_in_all_commands(hf):
    job = start(hf, "--label", "team=ml", "--timeout", "5m", "--expose", "8000", "python:3.12", *FOREVER)
    assert job in hf("ps", "--format", "json", "--label", "team=ml")
    assert job not in hf("ps", "--format", "json", "--label", "team=other")
    info = json.loads(hf("inspect", "--format", "json", job))[0]
    assert info["labels"]["team"] == "ml"
    assert info["status"]["expose_urls"][0].startswith("http://127.0.0.1:")
    assert "up" in hf("logs", job)
    hf("labels", job, "--label", "team=research")
    assert job in hf("ps", "--format", "json", "--label", "team=research")
    hf("cancel", job)
    assert "CANCELED" in hf("wait", job, fails=True)
    assert job not in hf("ps", "--format", "json")
    assert job in hf("ps", "-a", "--format", "json")


def test_stats(hf, emulator):
    job = start(hf, "python:3.12", *FOREVER)
    client = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    # 1.x of the command shows the numbers until the Job ends, so it is ended once they were asked for.
    asked = emulator.hub.runner.pids
    ending = threading.Timer(0, lambda: client.cancel_job(job_id=job, namespace="local"))

    def pids(state):
        if state.id == job and not ending.is_alive() and not ending.finished.is_set():
            ending.interval = 1.5  # one more event, a second after the first
            ending.start()
        return asked(state)

    emulator.hub.runner.pids = pids
    try:
        assert "17.2GB" in hf("stats", job)  # cpu-basic
    finally:
        emulator.hub.runner.pids = asked
        ending.cancel()
        ending.join()


def test_wait_and_hardware(hf):
    job = start(hf, "python:3.12", "true")
    assert "COMPLETED" in hf("wait", job)
    assert "h200x8" in hf("hardware") and "$40.00" in hf("hardware")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--flavor", "h900", "python:3.12", "true"), "flavor"),
        (("--label", "model=Qwen/Qwen2.5-Math-1.5B", "python:3.12", "true"), "100 characters"),
    ],
)
def test_refusals(hf, words, reason):
    assert reason in hf("run", *words, fails=True)


def test_a_wrong_token(hf):
    assert "token" in hf("ps", fails=True, HF_TOKEN="hf_wrong")


def test_a_local_directory_goes_along(hf, emulator, tmp_path):
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    (source / "main.py").write_text("print('ran', open('sub/data.txt').read())")
    (source / "sub" / "data.txt").write_text("first")
    (source / "same.txt").write_text("first")  # same content, same Xet hash
    script = "cd /work && python main.py && echo result > out.txt"
    assert "ran first" in hf("run", "-v", "./src:/work:rw", "python:3.12", "/bin/sh", "-c", script)
    (source / "sub" / "data.txt").write_text("second, and longer")
    script = "cd /work && python main.py"  # read-only unless asked otherwise
    assert "ran second, and longer" in hf("run", "-v", "./src:/work", "python:3.12", "/bin/sh", "-c", script)
    bucket = Bucket(replace(emulator.bucket, url="s3://jobs-artifacts"))
    folder = bucket.list("")[0].partition("/")[0]
    assert bucket.list("") == [f"{folder}/{name}" for name in ("main.py", "out.txt", "same.txt", "sub/data.txt")]
    assert bucket.get(f"{folder}/out.txt") == b"result\n"


def test_buckets(emulator, tmp_path):
    Bucket(emulator.bucket).put("runs/r/spec.json", b"{}")
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "NO_COLOR": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    for words, expected in (
        (("list", "--format", "json"), "local/asyncgrpo"),
        (("list", "local/asyncgrpo", "-R", "--format", "json"), "runs/r/spec.json"),
        (("info", "local/asyncgrpo"), "local/asyncgrpo"),
    ):
        done = subprocess.run(
            [HF, "buckets", *words],
            env={**home, **emulator.environment()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


TRAINER = """
import os, pathlib, time, urllib.error, urllib.request
folder = pathlib.Path("/bucket/adapters/v1")
folder.mkdir(parents=True)
(folder / "adapter.txt").write_text("of version 1")
for url in os.environ["REPLICAS"].split():
    asked = urllib.request.Request(url + "/adapters/v1/adapter.txt")
    asked.add_header("Authorization", "Bearer " + os.environ["HF_TOKEN"])
    while True:
        try:
            print("replica answers", urllib.request.urlopen(asked, timeout=5).read().decode(), flush=True)
            break
        except urllib.error.HTTPError as error:  # not up yet, or its mount does not show the file yet
            assert error.code in (404, 503), error
            time.sleep(0.1)
try:
    urllib.request.urlopen(url, timeout=5)
except urllib.error.HTTPError as error:
    print("without a token:", error.code)
"""


def test_two_replicas_and_a_trainer_with_nothing_of_ours_in_them(tmp_path):
    """The published shape: a mounted bucket, the same exposed port in both replicas, HTTPS, bearer token."""
    program = [sys.executable, str(Path(asyncgrpo.__file__)), "emulate", "--serve", "--tls"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as serve:
        try:
            environment = {}
            while not {"AWS_SECRET_ACCESS_KEY", "SSL_CERT_FILE"} <= set(environment):
                name, _, value = serve.stdout.readline().strip().partition("=")
                environment[name] = value
            home = {
                "HOME": str(tmp_path),
                "PATH": os.environ["PATH"],
                "NO_COLOR": "1",
                "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            }

            def hf(*words):
                done = subprocess.run(
                    [HF, "jobs", *words], env={**home, **environment}, capture_output=True, text=True, timeout=60
                )
                assert done.returncode == 0, done.stdout + done.stderr
                return done.stdout + done.stderr

            bucket = ("-v", "hf://buckets/local/asyncgrpo:/bucket")
            image = ("--", "vllm/vllm-openai:v0.31.0", "python")
            server = ("-m", "http.server", "8000", "--bind", "0.0.0.0", "--directory", "/bucket")
            replicas = [start(hf, "--expose", "8000", "-e", f"NAME=r{i}", *bucket, *image, *server) for i in range(2)]
            urls = [
                json.loads(hf("inspect", "--format", "json", job))[0]["status"]["expose_urls"][0] for job in replicas
            ]
            assert all(url.startswith("https://") for url in urls)
            told = hf("run", "-e", f"REPLICAS={' '.join(urls)}", "-s", "HF_TOKEN", *bucket, *image, "-c", TRAINER)
            assert told.count("replica answers of version 1") == 2
            assert "without a token: 401" in told
            for job in replicas:
                hf("cancel", job)
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait(timeout=30)
