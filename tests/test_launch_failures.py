"""A launch that fails, wherever it does: no Job is left, and the message says why."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from emulator.serve import Emulator
from jobs import bundle, crew, lease
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import AsyncgrpoError, BucketError
from jobs.launch import Launch
from jobs.site import Site
from tests.test_launch import alive, recipe, site, stages  # noqa: F401 (a fixture)

Break = Callable[[pytest.MonkeyPatch, Emulator], None]


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator(cpu_jobs=3) as emulator:
        yield emulator


def refuses(method: str, part: str) -> Break:
    """The bucket refuses one kind of call for keys with `part` in them."""

    def broken(monkeypatch: pytest.MonkeyPatch, _: Emulator) -> None:
        real = getattr(Bucket, method)

        def call(self: Bucket, *args: Any) -> Any:
            if part in (str(args[0]) if args else ""):
                raise BucketError(f"{method} {part}: the bucket refused it: AccessDenied: Access Denied.")
            return real(self, *args)

        monkeypatch.setattr(Bucket, method, call)

    return broken


def loses_answers(create: int, status: int | None = None, made: bool = True) -> Break:
    """From the `create`-th creation of a Job on, none is answered well: a time-out, or an error's status; the Job is
    made all the same, or is not."""

    def broken(monkeypatch: pytest.MonkeyPatch, _: Emulator) -> None:
        real, calls = HfApi.run_job, iter(range(1, 1000))

        def run_job(self: HfApi, **kwargs: Any) -> Any:
            lost = next(calls) >= create
            job = real(self, **kwargs) if made or not lost else None
            if not lost:
                return job
            request = httpx.Request("POST", "http://hub")
            if status is None:
                raise httpx.ReadTimeout("no answer", request=request)
            raise HfHubHTTPError(f"{status} of the Hub", response=httpx.Response(status, request=request))

        monkeypatch.setattr(HfApi, "run_job", run_job)

    return broken


def no_whoami(monkeypatch: pytest.MonkeyPatch, _: Emulator) -> None:
    def whoami(self: HfApi, **_: Any) -> Any:
        raise HfHubHTTPError("401 of the Hub", response=httpx.Response(401, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr(HfApi, "whoami", whoami)


def interrupted_while_waiting(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jobs.launch.time.sleep", sleep)


def nothing(*_: Any) -> None:
    pass


CASES: dict[str, tuple[Break, dict[str, Any], str]] = {
    "bucket": (refuses("ensure", ""), {}, "ensure : the bucket refused it"),
    "model": (refuses("put_file", "models/"), {}, "put_file models/: the bucket refused it"),
    "spec": (refuses("put_new", "spec.json"), {}, "put_new spec.json: the bucket refused it"),
    "first lease": (refuses("put", "lease.json"), {}, "put lease.json: the bucket refused it"),
    "archive": (refuses("put_file", "archives/"), {}, "put_file archives/: the bucket refused it"),
    "user": (no_whoami, {}, "refuses HF_TOKEN"),
    "roster": (refuses("put", "/crew"), {}, "put /crew: the bucket refused it"),
    "lead": (refuses("put_new", "leader.json"), {}, "put_new leader.json: the bucket refused it"),
    **{
        f"{role} is {what}": (broken, {}, f"{role} could not be started on flavor cpu-basic: {words}")
        for create, role in enumerate(("replica 0", "replica 1", "trainer 0"), start=1)
        for what, words, broken in (
            ("refused for want of credit", "402 of the Hub", loses_answers(create, 402, made=False)),
            ("never made, without an answer", "no answer", loses_answers(create, made=False)),
            ("never made, for the Hub fails", "503 of the Hub", loses_answers(create, 503, made=False)),
        )
    },
    "a replica's address": (
        refuses("put", "/replicas/"),
        {"end": "never starts", "start_deadline_s": 2},
        "no training step within",
    ),
    "progress is not to be read": (
        refuses("get_json", "progress.json"),
        {},
        "get_json progress.json: the bucket refused it",
    ),
    "trainer fails": (nothing, {"end": "fails"}, "the trainer failed: its reasons"),
    "trainer ends before it can say anything": (
        nothing,
        {"end": "fails at once"},
        r"ended before it began to train(?s:.)*words of its last line",
    ),
    "trainer never starts": (
        nothing,
        {"end": "never starts", "start_deadline_s": 2},
        "no training step within jobs.start_deadline_s = 2 s",
    ),
    "no machine": (
        nothing,
        {"replicas": 3, "schedule_deadline_s": 2},
        "had no cpu-basic for the trainer within jobs.schedule_deadline_s = 2 s",
    ),
    "replicas do not stay up": (nothing, {"end": "replicas die"}, "no replica stays up(?s:.)*words of its last line"),
    "interrupted": (interrupted_while_waiting, {}, "^$"),
}


@pytest.mark.parametrize("case", CASES)
def test_no_job_is_left_and_the_message_says_why(
    site: Site,  # noqa: F811
    emulator: Emulator,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, scene, words = CASES[case]
    monkeypatch.setattr(crew, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(crew, "MAX_RESTARTS", 1)
    if case == "archive":
        (archive := tmp_path / "asyncgrpo.pyz").write_bytes(b"an archive")
        monkeypatch.setattr(bundle, "archive", lambda: archive)
    deadlines = {f"jobs.{name}": value for name, value in scene.items() if name.endswith("_s")}
    chosen = recipe(scene.get("end", ""), **{**deadlines, "replica.count": scene.get("replicas", 2)})
    (model := tmp_path / "model").mkdir()
    (model / "weights").write_bytes(case.encode())
    run = "f-" + "".join(letter if letter.isalnum() else "-" for letter in case)
    broken(monkeypatch, emulator)
    with (
        pytest.raises((AsyncgrpoError, KeyboardInterrupt), match=words),
        Launch(site, chosen, run, "vllm", None, 0) as it,
    ):
        it.start(model)
        it.follow(lambda _: None)
    monkeypatch.undo()
    assert alive(site, run) == []
    if stages(site, run):
        assert lease.ended(Bucket(site.bucket), run), "one that is not found in the listing ends by itself"


@pytest.mark.parametrize("create", [1, 2, 3])
@pytest.mark.parametrize("status", [None, 500, 503])
def test_a_job_that_was_made_without_a_good_answer_is_the_runs(
    site: Site,  # noqa: F811
    emulator: Emulator,
    create: int,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = f"unanswered-{create}-{status}"
    loses_answers(create, status)(monkeypatch, emulator)
    with Launch(site, recipe(), run, "vllm", None, 0) as it:
        it.start()
        assert len(stages(site, run)) == 3, "none was started twice"
        assert it.follow(lambda _: None)["steps"] == 5
    assert alive(site, run) == []


def test_a_bucket_that_is_not_there_is_made(emulator: Emulator) -> None:
    settings = BucketSettings.from_env({**emulator.environment(), "ASYNCGRPO_BUCKET": "s3://not-yet"})
    bucket = Bucket(settings)
    with pytest.raises(BucketError, match="NoSuchBucket"):
        bucket.put("key", b"value")
    made = [threading.Thread(target=Bucket(settings).ensure) for _ in range(2)]
    for each in made:
        each.start()
    for each in made:
        each.join()
    bucket.ensure()
    assert bucket.put_new("key", b"value")
