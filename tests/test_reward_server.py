import asyncio
import json
import os
import pickle
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs import journal, reward_server
from jobs.errors import ConfigError, RunFailed
from jobs.recipe import Reward
from jobs.reward_server import TOKEN, RewardServer, Unanswered
from jobs.scoring import Scoring, from_settings

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def grading(token: str | None = None) -> Iterator[str]:
    """URL of a reward server, a process of its own, that runs until the block ends."""
    environ = {**os.environ, **({TOKEN: token} if token else {})}
    process = subprocess.Popen([sys.executable, "-m", "tests.grader"], cwd=ROOT, env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def grader() -> Iterator[str]:
    with grading() as url:
        yield url


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reward_server, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reward_server, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setenv(journal.OUTPUT_DIR, str(tmp_path))


def requests(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/requests") as answer:
        found: list[dict[str, Any]] = json.load(answer)
        return found


def asked(server: RewardServer, *texts: str, **columns: Any) -> list[float | None]:
    async def ask() -> list[float | None]:
        try:
            return await server(completions=list(texts), prompts=["p"] * len(texts), completion_ids=[[1]], **columns)
        finally:
            await server.close()

    return asyncio.run(ask())


def scored(url: str, *texts: str, timeout_s: float = 5.0) -> list[float | None]:
    """As TRL gets them, with errors counted instead of raised."""

    async def score() -> list[float | None]:
        server = RewardServer(url, "reward.functions[0]", timeout_s)
        try:
            (column,) = Scoring([server], [1.0]).columns
            return await column(completions=list(texts), prompts=["p"] * len(texts))
        finally:
            await server.close()

    return asyncio.run(score())


def told(tmp_path: Path) -> list[str]:
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    return [row["error"] for row in rows if row["event"] == "reward_error"]


def test_a_server_gets_what_a_function_gets_and_its_answer_is_the_reward() -> None:
    with grading() as url:
        server = pickle.loads(pickle.dumps(RewardServer(f"{url}/digit")))
        assert asked(server, "77", "7a", "none", answer=["1", "2", "3"], level=[1, None, 2.5]) == [1.0, 0.5, None]
        (request,) = requests(url)
        assert request["body"] == {
            "prompts": ["p", "p", "p"],
            "completions": ["77", "7a", "none"],
            "answer": ["1", "2", "3"],
            "level": [1, None, 2.5],
        }
        assert request["authorization"] is None
        assert server.__name__ == f"{url.removeprefix('http://')}/digit"


@pytest.mark.parametrize("status", [0, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again(grader: str, status: int) -> None:
    assert asked(RewardServer(f"{grader}/first/2/{status}"), "77") == [1.0]
    assert sum(request["path"] == f"/first/2/{status}" for request in requests(grader)) == 3


def test_a_server_that_is_started_late_is_waited_for(free_port: int) -> None:
    async def main() -> list[float | None]:
        server = RewardServer(f"http://127.0.0.1:{free_port}/digit")
        waiting = asyncio.create_task(server(completions=["77"]))
        while not server._client:
            await asyncio.sleep(0.01)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n[0.5]")
            await writer.drain()
            writer.close()

        late = await asyncio.start_server(answer, "127.0.0.1", free_port)
        try:
            return await waiting
        finally:
            await server.close()
            late.close()

    assert asyncio.run(main()) == [0.5]


def test_a_server_that_stays_away_leaves_the_group_unscored_and_in_the_end_ends_the_run(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port}/score"
    assert scored(url, "7", "77", timeout_s=0.1) == [None, None]
    (error,) = told(tmp_path)  # one for both: they are not tried one by one
    assert error.startswith(f"Unanswered: reward.functions[0] = '{url}': away for ") and "ConnectError" in error
    server = RewardServer(url, timeout_s=0.1)
    with pytest.raises(Unanswered):
        asked(server, "7")
    monkeypatch.setattr(reward_server, "AWAY_S", 0.0)
    with pytest.raises(RunFailed, match="Start the server, then the run again"):
        asked(server, "7")


def test_a_completion_on_which_the_server_fails_costs_only_itself(grader: str, tmp_path: Path) -> None:
    assert scored(f"{grader}/digit", "77", "boom", "7a") == [1.0, None, 0.5]
    (error,) = told(tmp_path)
    assert error.startswith("ValueError: reward.functions[0] = ") and error.endswith('status 500: "it went boom"')


def test_a_completion_that_takes_too_long_costs_only_itself(grader: str, tmp_path: Path) -> None:
    assert scored(f"{grader}/digit", "77", "slow", "7a", timeout_s=1.0) == [1.0, None, 0.5]
    (error,) = told(tmp_path)
    assert "no answer within 2 s (ReadTimeout)" in error


WRONG = {
    "[1.0]": "expected a JSON list of 2 numbers or nulls, got 1 of them",
    '["1", "2"]': 'got "1" at 0',
    '{"rewards": [1, 2]}': 'got {"rewards": [1, 2]}',
    "[1, NaN]": "returned nan: a reward is a finite number, or None",
}


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_that_is_none_is_told_in_one_line(grader: str, tmp_path: Path, answer: str) -> None:
    assert scored(f"{grader}/answer/{urllib.parse.quote(answer)}", "a", "b") in ([None, None], [1.0, 1.0])

    async def whole() -> None:
        server = RewardServer(f"{grader}/answer/{urllib.parse.quote(answer)}", "reward.functions[0]")
        try:
            Scoring([server], [1.0])._guards[0]._checked(await server(completions=["a", "b"]), 2)
        finally:
            await server.close()

    with pytest.raises(ValueError) as caught:
        asyncio.run(whole())
    assert WRONG[answer] in str(caught.value) and "\n" not in str(caught.value)


REFUSED = {
    401: f"status 401 .*set {TOKEN} to a token that it takes",
    403: f"set {TOKEN}",
    404: "check the path of the URL",
    405: "the endpoint must take POST",
    307: r"redirects to elsewhere\.example/score\. Give the URL",
}


@pytest.mark.parametrize("status", REFUSED)
def test_a_setting_that_is_wrong_ends_the_run_with_the_fix(grader: str, status: int) -> None:
    with pytest.raises(ConfigError, match=REFUSED[status]) as caught:
        scored(f"{grader}/always/{status}", "7")
    assert str(caught.value).startswith("reward.functions[0] = ") and "secret" not in str(caught.value)


def test_a_server_that_has_scored_may_be_away_in_any_way(grader: str) -> None:
    server = RewardServer(f"{grader}/first/2/404")
    server._has_scored = True
    assert asked(server, "77") == [1.0]


def test_a_refused_batch_is_tried_one_by_one(grader: str, tmp_path: Path) -> None:
    assert scored(f"{grader}/first/1/422", "77", "7a") == [1.0, 0.5]
    assert scored(f"{grader}/always/422", "77", "7a") == [None, None]
    assert len(told(tmp_path)) == 2 and "status 422" in told(tmp_path)[0]


def test_the_token_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with grading(token="rs-secret") as url:
        monkeypatch.setenv(TOKEN, "wrong-token")
        with pytest.raises(ConfigError, match=f"set {TOKEN}") as caught:
            asked(RewardServer(f"{url}/digit"), "7")
        assert "wrong-token" not in str(caught.value)
        monkeypatch.setenv(TOKEN, "rs-secret")
        server = RewardServer(f"{url}/digit")
        assert asked(server, "7") == [1.0]
        assert b"rs-secret" not in pickle.dumps(server)


def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_server.secrets({TOKEN: "rs-secret\n"}) == {TOKEN: "rs-secret"}  # as `cat` or a mounted secret has it
    monkeypatch.setenv(TOKEN, "rs-secret\nsecond")
    for refused in (lambda: reward_server.secrets(os.environ), lambda: asked(RewardServer("http://127.0.0.1:9/"), "7")):
        with pytest.raises(ConfigError, match=f"{TOKEN}: a token is one line of printable ASCII") as caught:
            refused()
        assert "rs-secret" not in str(caught.value)


def test_a_column_that_json_cannot_hold_is_named(grader: str) -> None:
    with pytest.raises(ConfigError, match="column `image` of the data set cannot be sent as JSON"):
        asked(RewardServer(f"{grader}/digit"), "7", image=[b"png"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http:///score", r"expected http\(s\)://host"),
        ("http://host:99999/", r"expected http\(s\)://host"),
        ("http://[::1/score", r"expected http\(s\)://host"),
        ("http://grader..example/score", r"expected http\(s\)://host"),
        ("http://xn--/score", r"expected http\(s\)://host"),
        ("http://grader\x00/score", r"expected http\(s\)://host"),
        ("https://me:hunter2@host/score", f"holds a password.*set {TOKEN} instead"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        from_settings(Reward([url]))
    assert "hunter2" not in str(caught.value)


def test_whether_anybody_answers_is_seen_before_the_run(grader: str, free_port: int) -> None:
    RewardServer(f"{grader}/digit").check(0.0)  # 405 to a GET: somebody is there
    with pytest.raises(ConfigError, match=r"reward\.functions = .*nobody answers there .*Start the server"):
        RewardServer(f"http://127.0.0.1:{free_port}/").check(0.0)


def test_several_groups_are_asked_for_at_once(grader: str) -> None:
    async def main() -> None:
        server = RewardServer(f"{grader}/digit")
        try:  # none is answered before all have been asked
            assert await asyncio.gather(*(server(completions=["together"]) for _ in range(4))) == [[0.0]] * 4
        finally:
            await server.close()

    asyncio.run(main())
