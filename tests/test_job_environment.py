import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from emulator.job_environment import Image, Places, command, environment, find_image, image_table, rebind, rewrite
from emulator.jobs_state import parse_spec
from emulator.serve import Emulator
from jobs.errors import ConfigError
from tests import environments

MOUNTS = {"/data": "/tmp/j/data", "/data/more": "/tmp/j/more", "/here": "/tmp/j/w"}


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("/data", "/tmp/j/data"),
        ("/data/", "/tmp/j/data/"),
        ("/data/x/y.py", "/tmp/j/data/x/y.py"),
        ("/data/more/x", "/tmp/j/more/x"),
        ("--out=/data/x", "--out=/tmp/j/data/x"),
        ("ls /data && cat '/here/a'", "ls /tmp/j/data && cat '/tmp/j/w/a'"),
        ("/here/a:/data", "/tmp/j/w/a:/tmp/j/data"),
        ("/database", "/database"),
        ("/data-2/x", "/data-2/x"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("https://host/here/x", "https://host/here/x"),
        ("./data", "./data"),
        ("/srv/data/x", "/srv/data/x"),
    ],
)
def test_mount_paths_are_rewritten_where_they_are_paths(text, local):
    assert rewrite(text, MOUNTS) == local


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("--port 8000", "--port 21000"),
        ("--port=8000", "--port=21000"),
        ("--host\0000.0.0.0\0--port\0008000\0--x", "--host\0000.0.0.0\0--port\00021000\0--x"),
        ("-p 8000", "-p 21000"),
        ("python -m http.server 8000 &", "python -m http.server 21000 &"),
        ("server(('', 8000))", "server(('', 21000))"),
        ("0.0.0.0:8000", "0.0.0.0:21000"),
        ("curl -s http://localhost:8000/v1", "curl -s http://localhost:21000/v1"),
        ("[::]:8000", "[::]:21000"),
        (":8000", ":21000"),
        ("--port 8000 --metrics-port 8001", "--port 21000 --metrics-port 21001"),
        ("--max-model-len 8000", "--max-model-len 8000"),
        ("--max-model-len\0008000", "--max-model-len\0008000"),
        ("http://other.host:8000/", "http://other.host:8000/"),
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000/"),
        ("80000 18000 8000x x8000 v8000 8000.5 1.8000", "80000 18000 8000x x8000 v8000 8000.5 1.8000"),
        ("ASYNCGRPO_BIND_8000", "ASYNCGRPO_BIND_8000"),
    ],
)
def test_exposed_ports_are_local_where_they_are_the_jobs_own(text, local):
    assert rebind(text, {8000: "127.0.0.1:21000", 8001: "127.0.0.1:21001"}) == local


def test_a_variable_is_a_port_if_its_name_or_its_form_says_so(tmp_path):
    asked = spec(environment={"PORT": "8000", "URL": "http://localhost:8000", "STEPS": "8000"}, secrets={"S": "8000"})
    made = environment(asked, "id", Image(), Places(tmp_path), {}, {8000: "127.0.0.1:21000"}, (), "mark")
    assert (made["PORT"], made["URL"]) == ("21000", "http://localhost:21000")
    assert (made["STEPS"], made["S"]) == ("8000", "8000")
    line = ["serve", "--port", "8000", "--max-len", "8000"]
    assert command(spec(command=line), Image(), {}, {8000: "127.0.0.1:21000"}) == [*line[:2], "21000", *line[3:]]


def spec(**fields):
    return parse_spec({"command": ["python"], "dockerImage": "python:3.12", **fields})


def test_nothing_of_the_host_is_in_the_environment(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SOMETHING", "PYTHONPATH", "LD_PRELOAD"):
        monkeypatch.setenv(name, "of the host")
    made = environment(spec(), "id", Image(), Places(tmp_path), {}, {}, (), "mark")
    assert "of the host" not in made.values()
    assert set(made) == {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "PWD",
        "PYTHONUNBUFFERED",
        "JOB_ID",
        "ACCELERATOR",
        "CPU_CORES",
        "MEMORY",
        "CUDA_VISIBLE_DEVICES",
        "ASYNCGRPO_EMULATOR",
    }
    assert made["HOME"].startswith(str(tmp_path)) and made["TMPDIR"].startswith(str(tmp_path))


def test_environment_secrets_and_what_the_hub_adds(tmp_path):
    asked = spec(
        environment={"A": "/data/x", "JOB_ID": "forged", "HOME": "/data"}, secrets={"S": "/data/x"}, flavor="h200x2"
    )
    made = environment(asked, "id", Image(), Places(tmp_path), MOUNTS, {8000: "127.0.0.1:1"}, ("2", "3"), "mark")
    assert made["A"] == "/tmp/j/data/x"
    assert made["S"] == "/data/x"  # a secret is nobody's path
    assert made["HOME"] == "/tmp/j/data"
    assert made["JOB_ID"] == "id"
    assert (made["ACCELERATOR"], made["CPU_CORES"], made["MEMORY"]) == ("h200x2", "46", "512Gi")
    assert made["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made["ASYNCGRPO_BIND_8000"] == "127.0.0.1:1"


@pytest.mark.parametrize("python", ["python", "python3", "python3.12"])
def test_python_is_the_images_interpreter(python):
    asked = spec(command=[python, "/here/x.py"], arguments=["--data", "/data"])
    assert command(asked, Image("/opt/py"), MOUNTS, {}) == ["/opt/py", "/tmp/j/w/x.py", "--data", "/tmp/j/data"]


def test_other_programs_stay():
    assert command(spec(command=["pythonic", "python"]), Image("/opt/py"), {}, {}) == ["pythonic", "python"]


def test_first_matching_image():
    images = {"python:*": Image("a"), "vllm/vllm-openai:*": Image("b")}
    assert find_image("vllm/vllm-openai:v0.11", images) == Image("b")
    assert find_image("ubuntu", images) is None
    assert find_image("ubuntu", {**images, "*": Image("c")}) == Image("c")


def test_a_shell_in_the_job_finds_the_interpreter_with_its_packages(tmp_path):
    places = Places(tmp_path / "job with space")
    places.make(Image())
    made = environment(spec(), "id", Image(), places, {}, {}, (), "mark")
    code = "import sys, starlette; print(sys.prefix)"
    for python in ("python", "python3"):
        printed = subprocess.run(
            ["/bin/sh", "-c", f"{python} -c '{code}'"], env=made, capture_output=True, text=True, timeout=20
        )
        assert printed.stdout.strip() == sys.prefix, printed.stderr
    assert list(places.home.iterdir()) == []


def test_a_users_images_come_before_the_one_for_all(tmp_path, monkeypatch):
    python = environments.environment(tmp_path / "env")
    monkeypatch.chdir(tmp_path)
    images = image_table(["mine:*=env/bin/python", "mine:2=" + sys.executable], {"CUDA_HOME": "/c"})
    assert find_image("mine:2", images) == Image(str(python), {"CUDA_HOME": "/c"}), "the first one that matches counts"
    assert find_image("ubuntu", images) == Image(sys.executable, {"CUDA_HOME": "/c"})
    assert find_image("ubuntu", image_table([f"*={python}"], {})) == Image(str(python))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mine", r"expected PATTERN=PYTHON, such as"),
        ("mine=", r"expected PATTERN=PYTHON, such as"),
        ("=python", r"expected PATTERN=PYTHON, such as"),
        ("mine=nowhere/python", r"there is no file /.*/nowhere/python\. Give the path of a Python interpreter"),
        ("mine=/nope/python", r"there is no file /nope/python\."),
        ("mine=.", r"there is no file /"),
        ("mine=plain", r"/.*/plain cannot be run\. Give the path of a Python interpreter"),
    ],
)
def test_an_entry_that_names_no_interpreter_is_refused(entry, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain").write_text("not a program")
    with pytest.raises(ConfigError, match=f"--image '{re.escape(entry)}': {words}"):
        image_table([entry], {})


def test_a_job_runs_in_the_environment_that_its_image_stands_for(tmp_path):
    python = environments.environment(tmp_path / "env", trl="9.9")
    code = "import importlib.metadata as m, sys; print(sys.prefix, m.version('trl'))"
    with Emulator(images=image_table([f"mine:*={python}"], {})) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        lines = {}
        for image in ("mine:1", "other:1"):
            for command in (["python", "-c", code], ["bash", "-c", f'python3 -c "{code}"']):
                job = api.run_job(image=image, command=command, namespace="local")
                lines[image, command[0]] = list(api.fetch_job_logs(job_id=job.id, namespace="local", follow=True))[-1]
    other = f"{sys.prefix} {importlib.metadata.version('trl')}"
    assert lines == {
        ("mine:1", "python"): f"{tmp_path / 'env'} 9.9",
        ("mine:1", "bash"): f"{tmp_path / 'env'} 9.9",
        ("other:1", "python"): other,
        ("other:1", "bash"): other,
    }
