"""The data plane: one result for each request, whatever engines and clients do."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from jobs import dispatch
from jobs.dispatch import Limits
from tests.upstreams import BASE, V1, V2, Handler, Seen, answer, json_response, proxied, until

PROMPT = list(range(100, 148))


def once(first: Handler) -> Handler:
    """Does `first` on the first completion, and answers properly afterwards."""
    asked = 0

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        nonlocal asked
        asked += 1
        return await first(request, body) if asked == 1 else json_response(answer(body))

    return handle


async def reset(request: web.Request, body: dict[str, Any]) -> None:
    return None


async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
    return json_response({"error": {"message": "EngineDead", "type": "InternalServerError", "code": 500}}, 500)


async def lacking(request: web.Request, body: dict[str, Any]) -> web.Response:
    message = f"The model `{body['model']}` does not exist."
    return json_response({"error": {"message": message, "type": "NotFoundError", "param": None, "code": 404}}, 404)


async def aborted(request: web.Request, body: dict[str, Any]) -> web.Response:
    payload = answer(body)
    payload["choices"][0]["finish_reason"] = "abort"
    return json_response(payload)


async def uneven(request: web.Request, body: dict[str, Any]) -> web.Response:
    payload = answer(body)
    payload["choices"][0]["logprobs"]["token_logprobs"].pop()
    return json_response(payload)


async def uneven_spaced(request: web.Request, body: dict[str, Any]) -> web.Response:
    payload = answer(body)
    payload["choices"][0]["token_ids"].append(1)
    return web.json_response(payload)  # with blanks, as not even vLLM writes it


async def cut_short(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"id":"cmpl')
    return None


async def no_json(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.Response(text="<html>gateway</html>")


async def unauthorized(request: web.Request, body: dict[str, Any]) -> web.Response:
    return json_response({"error": "bad key"}, 401)


async def busy(request: web.Request, body: dict[str, Any]) -> web.Response:
    return json_response({"error": "slow down"}, 429)


def test_names_are_mapped_both_ways_and_no_other_byte_changes() -> None:
    body = b'{ "model" : "trl-policy-v1",\n "prompt":[1, 2,3] , "metadata": {"model": "trl-policy-v1"}, "seed": 9e0 }'

    async def main() -> None:
        async with proxied(None) as proxy:
            headers = {"Content-Type": "application/json"}
            async with proxy.http.post(
                URL(proxy.url + "/v1/completions?x=%2F", encoded=True), data=body, headers=headers
            ) as response:
                assert response.status == 200
                assert (await response.json())["model"] == "trl-policy-v1"
            seen = proxy.engines[0].seen[0]
            assert seen.body == body.replace(b'"trl-policy-v1",', f'"{V1}",'.encode())
            assert seen.path == "/v1/completions?x=%2F"
            assert seen.headers["content-type"] == "application/json"

    asyncio.run(main())


@pytest.mark.parametrize(("asked", "sent"), [(V1, V1), (BASE, BASE), ("trl-policy-v2", V2)])
def test_the_answer_names_the_model_as_it_was_asked_for(asked: str, sent: str) -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            status, payload = await proxy.complete(model=asked)
            assert (status, payload["model"]) == (200, asked)
            assert proxy.engines[0].seen[0].json["model"] == sent

    asyncio.run(main())


def test_an_unknown_model_gets_vllms_words() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            status, payload = await proxy.complete(model="trl-policy-v99")
            assert status == 404
            assert payload["error"]["message"] == "The model `trl-policy-v99` does not exist."
            assert not proxy.engines[0].seen

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "sent"), [(10, 50, 50), (90, 50, 10), (99, 50, 1), (100, 50, 50), (150, 50, 50)]
)
def test_max_tokens_is_cut_to_what_fits(prompt_tokens: int, asked: int, sent: int) -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            proxy.pool.limit = 100
            await proxy.complete(list(range(prompt_tokens)), max_tokens=asked)
            assert proxy.engines[0].seen[0].json["max_tokens"] == sent

    asyncio.run(main())


def test_cutting_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            proxy.pool.limit = 10
            for _ in range(3):
                await proxy.complete(list(range(8)), max_tokens=50)

    asyncio.run(main())
    assert len([record for record in caplog.records if "max_tokens" in record.message]) == 1


@pytest.mark.parametrize(
    ("fault", "failed", "missing"),
    [
        (reset, True, False),
        (broken, True, False),
        (lacking, False, True),
        (aborted, True, False),
        (uneven, False, False),
        (uneven_spaced, False, False),
        (cut_short, True, False),
        (no_json, True, False),
        (unauthorized, True, False),
        (busy, False, False),
    ],
)
def test_what_is_no_result_is_asked_for_elsewhere(fault: Handler, failed: bool, missing: bool) -> None:
    async def main() -> None:
        async with proxied(once(fault), None) as proxy:
            status, _ = await proxy.complete(PROMPT)
            assert status == 200
            assert [len(engine.seen) for engine in proxy.engines] == [1, 1]
            assert proxy.count("redispatched") == 1
            assert ([engine for engine, _ in proxy.pool.failures] == ["0"]) is failed
            assert proxy.pool.missed == ([("0", V1)] if missing else [])
            assert proxy.idle()

    asyncio.run(main())


def test_a_refused_connection_goes_elsewhere() -> None:
    async def main() -> None:
        async with proxied(None, None) as proxy:
            await proxy.engines[0].stop()
            for _ in range(3):
                assert (await proxy.complete(PROMPT))[0] == 200
            assert [engine for engine, _ in proxy.pool.failures] == ["0"]
            assert "no connection" in proxy.pool.failures[0][1]

    asyncio.run(main())


def test_an_engines_own_verdict_passes_unchanged() -> None:
    verdict = b'{"error": {"message": "prompt is too long",  "type": "BadRequestError", "param": null, "code": 400}}'

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=verdict, status=400, content_type="application/json", headers={"x-own": "1"})

    async def main() -> None:
        async with proxied(refuse, refuse) as proxy:
            async with proxy.http.post(proxy.url + "/v1/completions", json={"model": V1, "prompt": PROMPT}) as response:
                assert (response.status, await response.read(), response.headers["x-own"]) == (400, verdict, "1")
            assert sum(len(engine.seen) for engine in proxy.engines) == 1
            assert not proxy.pool.failures
            assert proxy.count("answered") == 1

    asyncio.run(main())


def test_failed_engines_are_remembered_and_the_number_of_tries_is_bounded() -> None:
    async def main() -> None:
        async with proxied(uneven, uneven, limits=Limits(max_redispatches=3)) as proxy:
            status, payload = await proxy.complete(PROMPT)
            assert status == 503
            assert "proxy.max_redispatches = 3" in payload["error"]["message"]
            assert "token_logprobs" in payload["error"]["message"]
            assert [len(engine.seen) for engine in proxy.engines] == [2, 2]
            assert (proxy.count("lost"), proxy.count("redispatched")) == (1, 3)
            assert proxy.idle()

    asyncio.run(main())


def test_refused_connections_do_not_use_up_the_tries() -> None:
    async def main() -> None:
        async with proxied(*[None] * 6, limits=Limits(max_redispatches=1)) as proxy:
            for engine in proxy.engines[:5]:
                await engine.stop()
            assert (await proxy.complete(PROMPT))[0] == 200

    asyncio.run(main())


def test_the_former_request_is_closed_before_the_next_is_sent() -> None:
    async def main() -> None:
        open_elsewhere: list[int] = []

        async def watch(request: web.Request, body: dict[str, Any]) -> web.Response:
            await until(lambda: first.open == 0)
            open_elsewhere.append(first.open)
            return json_response(answer(body))

        async with proxied(cut_short, watch) as proxy:
            first = proxy.engines[0]
            assert (await proxy.complete(PROMPT))[0] == 200
            assert open_elsewhere == [0]

    asyncio.run(main())


def test_completions_of_an_engine_that_is_given_up_go_elsewhere() -> None:
    async def hang(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def main() -> None:
        async with proxied(hang) as proxy:
            asked = [asyncio.create_task(proxy.complete([n] * 20)) for n in range(20)]
            await until(lambda: proxy.engines[0].open == 20)
            proxy.pool.give_up("0")
            await until(lambda: proxy.engines[0].closed_by_peer == 20)
            await until(lambda: proxy.count("parked") == 20)
            proxy.engines[0].handler = None
            proxy.pool.add("0", proxy.engines[0].url)
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert proxy.count("redispatched") == 20
            assert proxy.idle()

    asyncio.run(main())


async def wait_for_end(request: web.Request, body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


def test_a_newcomer_takes_over_what_others_have_just_begun() -> None:
    """Engines of one start come seconds apart; the first of them must not keep all that was parked."""

    async def main() -> None:
        async with proxied(wait_for_end, None, None) as proxy:
            first, *others = proxy.engines
            for name in ("1", "2"):
                proxy.pool.drop(name)
            asked = [asyncio.create_task(proxy.complete([n] * 20)) for n in range(30)]
            await until(lambda: first.open == 30)
            for number, engine in enumerate(others, start=1):
                engine.handler = wait_for_end
                proxy.pool.add(str(number), engine.url)
                await until(lambda engine=engine: engine.open >= 10)
            await until(lambda: [engine.open for engine in proxy.engines] == [10, 10, 10])
            assert proxy.count("redispatched") == 25  # 15 to the first newcomer, then 5 of each to the second
            assert proxy.engines[0].closed_by_peer == 20
            for engine in proxy.engines:
                engine.handler = None
            for name in ("0", "1", "2"):
                proxy.pool.give_up(name)
            await until(lambda: sum(engine.open for engine in proxy.engines) == 0)
            proxy.pool.add("0", first.url)
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert (proxy.count("answered"), proxy.count("lost")) == (30, 0)
            assert proxy.idle()

    asyncio.run(main())


def test_engines_of_one_start_lose_nothing_and_share_what_was_parked() -> None:
    """A move is no failure of an engine."""

    def balanced(work: list[int]) -> bool:
        return (sum(work), min(work)) == (120, 120 // len(work))

    async def main() -> None:
        async with proxied(*[wait_for_end] * 12, limits=Limits(max_redispatches=0)) as proxy:
            for engine in proxy.engines[1:]:
                proxy.pool.drop(engine.name)
            asked = [asyncio.create_task(proxy.complete([n] * 20)) for n in range(120)]
            for ready in range(1, 13):
                engines = proxy.engines[:ready]
                proxy.pool.add(engines[-1].name, engines[-1].url)
                await until(lambda engines=engines: balanced([engine.open for engine in engines]))
            assert not any(task.done() for task in asked)
            assert proxy.count("redispatched") == sum(len(engine.seen) for engine in proxy.engines) - 120
            assert not proxy.pool.failures
            for task in asked:
                task.cancel()
            await until(proxy.idle)

    asyncio.run(main())


def test_what_was_moved_is_not_moved_again_while_others_can_be() -> None:
    """Though it is the youngest where it is: otherwise it would start anew with each engine that comes."""

    async def main() -> None:
        async with proxied(*[wait_for_end] * 3) as proxy:
            asked = []

            async def ask(count: int) -> None:
                start = len(asked)
                asked.extend(asyncio.create_task(proxy.complete([n] * 20)) for n in range(start, start + count))
                await until(lambda: sum(engine.open for engine in proxy.engines) == start + count)

            for name in ("0", "2"):
                proxy.pool.drop(name)
            await ask(4)
            proxy.pool.drop("1")
            proxy.pool.add("0", proxy.engines[0].url)
            await ask(10)
            proxy.pool.add("1", proxy.engines[1].url)
            await until(lambda: [engine.open for engine in proxy.engines] == [7, 7, 0])
            proxy.pool.add("2", proxy.engines[2].url)
            await until(lambda: sorted(engine.open for engine in proxy.engines) == [4, 4, 6])
            tries = Counter(seen.json["prompt"][0] for engine in proxy.engines for seen in engine.seen)
            assert sorted(tries.values()) == 7 * [1] + 7 * [2]
            for task in asked:
                task.cancel()
            await until(proxy.idle)

    asyncio.run(main())


def test_an_engine_that_is_given_up_has_failed_what_it_worked_on() -> None:
    async def main() -> None:
        async with proxied(wait_for_end, None, limits=Limits(max_redispatches=0)) as proxy:
            proxy.pool.drop("1")
            asked = asyncio.create_task(proxy.complete())
            await until(lambda: proxy.engines[0].open == 1)
            proxy.pool.give_up("0")
            status, payload = await asked
            assert status == 503
            assert "1 engines failed this completion" in payload["error"]["message"]
            assert "engine 0: given up while it worked on this" in payload["error"]["message"]

    asyncio.run(main())


def test_a_newcomer_takes_over_only_versions_that_it_serves() -> None:
    async def main() -> None:
        async with proxied(wait_for_end, wait_for_end) as proxy:
            proxy.pool.drop("1")
            asked = [asyncio.create_task(proxy.complete([n] * 20, model=model)) for n in range(5) for model in (V1, V2)]
            await until(lambda: proxy.engines[0].open == 10)
            proxy.pool.add("1", proxy.engines[1].url, [V2])
            await until(lambda: [engine.open for engine in proxy.engines] == [5, 5])
            assert {seen.json["model"] for seen in proxy.engines[1].seen} == {V2}
            assert (proxy.count("redispatched"), proxy.engines[0].closed_by_peer) == (5, 5)
            for task in asked:
                task.cancel()
            await until(proxy.idle)

    asyncio.run(main())


def test_what_is_long_under_way_or_being_streamed_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "YOUNG_S", 0.05)

    async def main() -> None:
        async with proxied(wait_for_end, None) as proxy:
            proxy.pool.drop("1")
            asked = [asyncio.create_task(proxy.complete([n] * 20)) for n in range(10)]
            await until(lambda: proxy.engines[0].open == 10)
            await asyncio.sleep(0.1)
            young = [asyncio.create_task(proxy.complete([n] * 20)) for n in range(20, 24)]
            await until(lambda: proxy.engines[0].open == 14)
            proxy.pool.add("1", proxy.engines[1].url)
            assert {status for status, _ in await asyncio.gather(*young)} == {200}
            assert proxy.engines[0].open == 10
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(main())


def test_parked_until_an_engine_has_the_version_and_freed_in_order() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            proxy.pool.up["0"] = {V1}
            asked = []
            for number in range(10):
                asked.append(asyncio.create_task(proxy.complete([number] * 20, model="trl-policy-v2")))
                await until(lambda: proxy.count("parked") == len(asked))
            assert (await proxy.complete(PROMPT))[0] == 200  # another version is not held up
            assert proxy.pool.in_flight[V2] == 10
            proxy.pool.add("0", proxy.engines[0].url, [V1, V2])
            await asyncio.gather(*asked)
            order = [seen.json["prompt"][0] for seen in proxy.engines[0].completions[1:]]
            assert order == list(range(10))
            assert (proxy.count("parked"), proxy.count("parked_total")) == (0, 10)
            assert proxy.count("parked_s") > 0
            assert proxy.idle()

    asyncio.run(main())


def test_parking_is_bounded_in_number_and_time() -> None:
    async def main() -> None:
        async with proxied(limits=Limits(max_parked=2, park_timeout_s=0.3)) as proxy:
            results = await asyncio.gather(*(proxy.complete(PROMPT) for _ in range(3)))
            messages = sorted(payload["error"]["message"] for _, payload in results)
            assert {status for status, _ in results} == {503}
            assert "proxy.max_parked" in messages[0]
            assert "proxy.park_timeout_s" in messages[-1]
            assert proxy.count("lost") == 3
            assert proxy.idle()

    asyncio.run(main())


def test_the_time_in_which_an_engine_worked_is_no_wait() -> None:
    """The one that it had waited for fails after longer than anything may wait."""
    limit_s = 0.2
    began = []

    async def fails_late(request: web.Request, body: dict[str, Any]) -> web.Response:
        began.append(body)
        if len(began) > 1:
            return json_response(answer(body))
        await asyncio.sleep(1.5 * limit_s)
        return web.Response(status=500)

    async def main() -> None:
        async with proxied(fails_late, limits=Limits(park_timeout_s=limit_s)) as proxy:
            proxy.pool.suspect_on_failure = False
            proxy.pool.drop("0")
            asked = asyncio.create_task(proxy.complete(PROMPT))
            await until(lambda: proxy.count("parked") == 1)
            proxy.pool.add("0", proxy.engines[0].url)
            assert (await asked)[0] == 200 and len(began) == 2

    asyncio.run(main())


def test_a_version_that_cannot_be_loaded_is_told_with_the_replicas_words() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            proxy.pool.up["0"] = {V1}
            asked = asyncio.create_task(proxy.complete(PROMPT, model=V2))
            await until(lambda: proxy.count("parked") == 1)
            proxy.pool.hopeless = "replica 0: out of slots"
            proxy.pool.changed()
            status, payload = await asked
            assert status == 503
            assert "out of slots" in payload["error"]["message"]

    asyncio.run(main())


def test_a_parked_completion_ends_with_its_client() -> None:
    async def main() -> None:
        async with proxied() as proxy:
            asked = asyncio.create_task(proxy.complete(PROMPT))
            await until(lambda: proxy.count("parked") == 1)
            asked.cancel()
            await until(proxy.idle)
            assert proxy.count("cancelled") == 1

    asyncio.run(main())


def test_a07_rollouts_of_a_prompt_follow_each_other() -> None:
    async def main() -> None:
        async with proxied(None, None, None) as proxy:
            template = list(range(2000))
            prompts = [[*template, *([number] * 5)] for number in range(60)]
            rollouts = [prompt for prompt in prompts for _ in range(8)]
            random.Random(3).shuffle(rollouts)
            gate = asyncio.Semaphore(16)

            async def ask(prompt: list[int]) -> None:
                async with gate:
                    await proxy.complete(prompt)

            await asyncio.gather(*map(ask, rollouts))
            homes: dict[int, list[str]] = {}
            for engine in proxy.engines:
                assert abs(len(engine.seen) / len(rollouts) * 3 - 1) < 0.15
                for seen in engine.seen:
                    homes.setdefault(seen.json["prompt"][-1], []).append(engine.name)
            followers = sum(max(map(names.count, set(names))) - 1 for names in homes.values())
            assert followers / (len(rollouts) - len(prompts)) >= 0.8
            routing = proxy.completions.snapshot()["routing"]
            assert routing["affinity"] + routing["cold"] == pytest.approx(1)

    asyncio.run(main())


SHAPES: list[Any] = [
    "text",
    ["a", "b"],
    [1, 2],
    [[1, 2], [3, 4]],
    [],
    None,
    [1.5, "x"],
    [[1], "x"],
    {},
    7,
    [[]],
    [None],
]


@pytest.mark.parametrize("prompt", SHAPES, ids=repr)
def test_a08_every_shape_of_prompt_reaches_an_engine_as_it_is(prompt: Any) -> None:
    async def verdict(request: web.Request, body: dict[str, Any]) -> web.Response:
        return json_response({"error": {"message": "engine's own"}}, 400)

    async def main() -> None:
        async with proxied(verdict) as proxy:
            body = {"model": V1, "prompt": prompt} if prompt is not None else {"model": V1}
            text = json.dumps(body).encode()
            async with proxy.http.post(proxy.url + "/v1/completions", data=text) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"] == "engine's own"
            seen = [each.json.get("prompt") for each in proxy.engines[0].seen]
            if prompt in (["a", "b"], [[1, 2], [3, 4]]):
                assert seen
                assert all(each in prompt for each in seen)
            else:
                assert proxy.engines[0].seen[0].body == text
            assert proxy.idle()

    asyncio.run(main())


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)), min_size=1, max_size=5), st.data()
)
def test_a08_no_body_makes_a_500(bodies: list[bytes], data: st.DataObject) -> None:
    keys = st.sampled_from(["model", "prompt", "max_tokens", "n", "stream", "messages", "request_id"])
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from([V1, BASE, "x"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=6,
    )
    odd = data.draw(st.lists(st.dictionaries(keys, values, max_size=6), max_size=5))

    async def refuse(request: web.Request, body: Any) -> web.Response:
        return json_response({"error": "own"}, 422)

    async def main() -> None:
        async with proxied(refuse) as proxy:
            for body in [*bodies, *(json.dumps(each).encode() for each in odd)]:
                for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                    async with proxy.http.post(proxy.url + path, data=body) as response:
                        assert response.status in (404, 422)
            assert proxy.idle()

    asyncio.run(main())


def test_a08_token_prompts_land_where_their_blocks_are() -> None:
    async def main() -> None:
        async with proxied(None, None) as proxy:
            for _ in range(4):
                await proxy.complete(list(range(1, 33)))
            assert sorted(len(engine.seen) for engine in proxy.engines) == [0, 4]
            # A further turn of the same conversation, too.
            await proxy.complete(list(range(1, 60)))
            assert sorted(len(engine.seen) for engine in proxy.engines) == [0, 5]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a09_a_client_that_leaves_takes_the_engines_work_with_it(stream: bool) -> None:
    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while True:
                await response.write(b'data: {"choices":[]}\n\n')
                await asyncio.sleep(0.05)
        await asyncio.sleep(20)
        return json_response(answer(body))

    async def main() -> None:
        async with proxied(slow, slow) as proxy:
            asked = [asyncio.create_task(proxy.complete([n] * 20, stream=stream)) for n in range(50)]
            await until(lambda: sum(engine.open for engine in proxy.engines) == 50)
            for task in asked:
                task.cancel()
            await until(proxy.idle, 2.0)
            assert sum(engine.closed_by_peer for engine in proxy.engines) == 50
            assert proxy.count("cancelled") == 50
            assert not proxy.pool.failures

    asyncio.run(main())


def test_a09_watching_the_client_does_not_eat_the_body() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            text = "\u00e9" * 1_000_000

            async def pieces() -> Any:
                body = json.dumps(
                    {"model": "trl-policy-v1", "prompt": text, "max_tokens": 1}, ensure_ascii=False
                ).encode()
                for start in range(0, len(body), 70_000):
                    yield body[start : start + 70_000]
                    await asyncio.sleep(0)

            async with proxy.http.post(proxy.url + "/v1/completions", data=pieces()) as response:
                assert response.status == 200
            assert proxy.engines[0].seen[0].json["prompt"] == text

    asyncio.run(main())


def test_a13_large_bodies_pass_in_both_directions() -> None:
    big = "y" * 20_000_000

    async def reply(request: web.Request, body: dict[str, Any]) -> web.Response:
        payload = answer(body)
        payload["choices"][0]["text"] = big
        return json_response(payload)

    async def main() -> None:
        async with proxied(reply) as proxy:
            proxy.pool.limit = None
            ids = [random.Random(1).randrange(150_000) for _ in range(400_000)]
            status, payload = await proxy.complete(ids)
            assert status == 200
            assert payload["choices"][0]["text"] == big
            assert proxy.engines[0].seen[0].json["prompt"] == ids

    asyncio.run(main())


def test_a13_limits_name_their_setting() -> None:
    async def main() -> None:
        async with proxied(None, limits=Limits(max_body_bytes=1000, max_batch=2)) as proxy:
            status, payload = await proxy.complete(list(range(1000)))
            assert status == 413
            assert "proxy.max_body_bytes = 1000" in payload["error"]["message"]
            status, payload = await proxy.complete([[1], [2], [3]])
            assert status == 400
            assert "proxy.max_batch = 2" in payload["error"]["message"]
            assert not proxy.engines[0].seen
            assert proxy.idle()

    asyncio.run(main())


def test_batches_are_routed_one_by_one_and_answered_as_one() -> None:
    async def main() -> None:
        async with proxied(None, None) as proxy:
            prompts = [[number] * (20 + number) for number in range(6)]
            status, payload = await proxy.complete(prompts, n=2, request_id="mine")
            assert status == 200
            assert [choice["index"] for choice in payload["choices"]] == list(range(12))
            assert payload["usage"]["prompt_tokens"] == sum(map(len, prompts))
            assert payload["usage"]["completion_tokens"] == 4 * 6
            assert payload["model"] == "trl-policy-v1"
            seen: list[Seen] = [each for engine in proxy.engines for each in engine.seen]
            assert sorted(each.json["prompt"] for each in seen) == prompts
            assert sorted(each.json["request_id"] for each in seen) == [f"mine-{number}" for number in range(6)]
            assert all(engine.seen for engine in proxy.engines)
            assert proxy.count("asked") == proxy.count("answered") == 1
            assert proxy.idle()

    asyncio.run(main())


def test_a_batch_with_a_prompt_that_is_refused_is_refused() -> None:
    async def picky(request: web.Request, body: dict[str, Any]) -> web.Response:
        if body["prompt"] == [2]:
            return json_response({"error": {"message": "not that one"}}, 400)
        await asyncio.sleep(20)
        return json_response(answer(body))

    async def main() -> None:
        async with proxied(picky) as proxy:
            status, payload = await proxy.complete([[1], [2], [3]])
            assert (status, payload["error"]["message"]) == (400, "not that one")
            await until(proxy.idle, 2.0)

    asyncio.run(main())


def test_ten_thousand_completions_with_clients_that_leave_leave_nothing_behind() -> None:
    rng = random.Random(7)
    cut: set[int] = set()

    async def mostly_quick(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        await asyncio.sleep(0 if body["seed"] % 4 else 0.01)
        if body["seed"] % 500 == 0 and body["seed"] not in cut:
            cut.add(body["seed"])
            return None
        return json_response(answer(body))

    async def main() -> None:
        async with proxied(mostly_quick, mostly_quick) as proxy:
            proxy.pool.suspect_on_failure = False
            numbers = iter(range(10_000))

            async def client() -> None:
                for number in numbers:
                    ask = proxy.complete([number // 8] * 20, max_tokens=1, seed=number)
                    if rng.random() < 0.2:
                        try:
                            await asyncio.wait_for(ask, rng.random() * 0.01)
                        except TimeoutError:
                            pass
                    else:
                        status, payload = await ask
                        assert status == 200
                        assert payload["choices"][0]["token_ids"] == [0]

            await asyncio.gather(*(client() for _ in range(64)))
            await until(proxy.idle)
            counts = proxy.completions.snapshot()["completions"]
            assert counts["asked"] == counts["answered"] + counts["cancelled"]
            assert counts["cancelled"] > 100
            assert counts["lost"] == 0
            assert cut

    asyncio.run(main())


def test_another_paths_model_is_mapped_too() -> None:
    async def echo(request: web.Request, body: dict[str, Any]) -> web.Response:
        return json_response({"model": body["model"], "count": 3})

    async def main() -> None:
        async with proxied(echo) as proxy:
            async with proxy.http.post(
                proxy.url + "/tokenize", json={"model": "trl-policy-v1", "prompt": "x"}
            ) as response:
                assert await response.json() == {"model": "trl-policy-v1", "count": 3}
            assert proxy.engines[0].seen[0].json["model"] == V1

    asyncio.run(main())


def test_chat_is_routed_by_its_messages() -> None:
    async def chat(request: web.Request, body: dict[str, Any]) -> web.Response:
        return json_response(
            {"model": body["model"], "choices": [{"index": 0, "finish_reason": "stop", "message": {}}]}
        )

    async def main() -> None:
        async with proxied(chat, chat) as proxy:
            messages = [{"role": "user", "content": "x" * 500}]
            for _ in range(3):
                body = {"model": V1, "messages": messages}
                async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body) as response:
                    assert response.status == 200
                messages = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
            assert sorted(len(engine.seen) for engine in proxy.engines) == [0, 3]

    asyncio.run(main())


def test_websockets_are_refused() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await proxy.http.ws_connect(proxy.url + "/v1/realtime")

    asyncio.run(main())
