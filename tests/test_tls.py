"""HTTPS between the Jobs: who trusts the emulator's authority reaches everything, who does not reaches nothing."""

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from emulator import tls
from emulator.serve import Emulator
from jobs import hub
from jobs.bundle import app_dir
from jobs.http import KEY_HEADER
from jobs.replica import MIDDLEWARE
from jobs.site import Site
from tests.engines import KEY, engine_environ, sim_command

CLIENTS = """
import asyncio, json, os, sys, urllib.request
import aiohttp
from jobs import hub
from jobs.bucket import Bucket
from jobs.connections import Connections
url, token = sys.argv[1], os.environ["HF_TOKEN"]
bearer = {"Authorization": f"Bearer {token}"}

async def proxy():
    headers = [(b"authorization", bearer["Authorization"].encode())]
    return (await Connections().request(url, b"GET", b"/", headers, b"")).status

async def aiohttp_():
    async with aiohttp.ClientSession() as session, session.get(url, headers=bearer) as response:
        return response.status

clients = {
    "proxy": lambda: asyncio.run(proxy()),
    "aiohttp": lambda: asyncio.run(aiohttp_()),
    "urllib": lambda: urllib.request.urlopen(urllib.request.Request(url, headers=bearer)).status,
    "huggingface_hub": lambda: hub.connect(os.environ["HF_ENDPOINT"], token).whoami()["name"],
    "bucket": lambda: Bucket.from_env(os.environ, retry_s=0.1).list(""),
}
said = {}
for name, call in clients.items():
    try:
        said[name] = call()
    except Exception as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with pytest.MonkeyPatch.context() as host, Emulator(https=True, grace_s=0.5) as emulator:
        assert emulator.certificate is not None
        for name, value in emulator.certificate.environment().items():
            host.setenv(name, value)
        close_session()  # it may have been made before
        yield emulator
    close_session()


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def talk(emulator: Emulator, url: str, **environ: str) -> dict[str, Any]:
    """What each client that a run's roles use says, started with the emulator's environment."""
    environment = {**os.environ, "PYTHONPATH": str(app_dir()), **emulator.environment(), **environ}
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, url], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_every_client_reaches_everything_or_nothing(emulator: Emulator, tmp_path: Path) -> None:
    api = hub.connect(emulator.endpoint, emulator.token)
    command = ["python", "-m", "http.server", "8000"]
    job = api.run_job(image="python:3.12", command=command, expose=[8000], namespace="local")
    url = job.status.expose_urls[0]
    assert all(each.startswith("https://127.0.0.1:") for each in (url, emulator.endpoint, emulator.bucket.endpoint))
    eventually(lambda: talk(emulator, url)["urllib"] == 200)
    trusted = talk(emulator, url)
    assert trusted == {"proxy": 200, "aiohttp": 200, "urllib": 200, "huggingface_hub": "local", "bucket": []}
    stranger = tls.issue(tmp_path).environment()
    refused = talk(emulator, url, **stranger)
    assert refused.keys() == trusted.keys()
    assert all("CERTIFICATE_VERIFY_FAILED" in words for words in refused.values()), refused
    plain = url.replace("https://", "http://")
    assert all(talk(emulator, plain)[name] != 200 for name in ("proxy", "aiohttp", "urllib"))
    api.cancel_job(job_id=job.id, namespace="local")


def test_the_proxy_reaches_its_replicas_through_the_gateway(emulator: Emulator, tmp_path: Path, free_port: int) -> None:
    """The real proxy before a simulated engine in a Job: HTTPS, the gateway's token, the replica's key."""
    api = hub.connect(emulator.endpoint, emulator.token)
    job = api.run_job(
        image="vllm",
        command=["python", *sim_command(8000)[1:], "--middleware", MIDDLEWARE],
        env={**engine_environ(tmp_path, emulator.bucket.environment()), "PYTHONPATH": str(app_dir())},
        secrets=emulator.bucket.secrets(),
        expose=[8000],
        namespace="local",
    )
    url = job.status.expose_urls[0]
    program = [sys.executable, str(Path(app_dir(), "asyncgrpo.py")), "role", "proxy"]
    own = {"ASYNCGRPO_RUN": "run", "ASYNCGRPO_KEY": KEY, "ASYNCGRPO_ATTEMPT": "1"}
    proxy = subprocess.Popen(
        [*program, "--port", str(free_port), "--replica", url],
        env={**os.environ, **emulator.environment(), **own},
        stderr=subprocess.DEVNULL,
    )

    def ready() -> bool:
        try:
            status = json.load(urllib.request.urlopen(f"http://127.0.0.1:{free_port}/asyncgrpo/status", timeout=5))
        except OSError:
            return False
        return [replica["state"] for replica in status["replicas"]] == ["ready"]

    try:
        eventually(ready)
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{free_port}/v1/completions", body, {"content-type": "application/json"}
        )
        assert json.load(urllib.request.urlopen(asked, timeout=30))["usage"]["completion_tokens"] == 3
        context = ssl.create_default_context()
        for headers, status in (
            ({}, 401),
            ({KEY_HEADER: KEY}, 401),
            ({"Authorization": f"Bearer {emulator.token}"}, 401),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), context=context)
            assert refused.value.code == status
            refused.value.close()
    finally:
        proxy.terminate()
        proxy.wait(timeout=15)
        api.cancel_job(job_id=job.id, namespace="local")


def test_a_launch_of_the_emulator_counts_as_local(emulator: Emulator) -> None:
    assert Site.from_env(emulator.environment()).local


def test_the_certificates_files(tmp_path: Path) -> None:
    certificate = tls.issue(tmp_path / "made")
    assert certificate.key.stat().st_mode & 0o777 == 0o600
    context = certificate.client_context()
    names = [dict(pair[0] for pair in authority["subject"]) for authority in context.get_ca_certs()]
    assert {"commonName": "asyncgrpo emulator"} in names and len(names) > 50  # the public ones as well
    assert "PRIVATE KEY" not in certificate.authorities.read_text() + certificate.chain.read_text()
