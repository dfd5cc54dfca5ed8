"""The proxy's data plane: completions in, exactly one result each, from whichever engine can give it.

A raw ASGI application. POST /v1/completions and /v1/chat/completions, and any other POST that names a model which the
fleet knows, get the whole service: names mapped both ways, routing, parking, another engine when one fails. Everything
else is forwarded to one ready engine as it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from jobs.answers import Opened, take_answer, take_stream
from jobs.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    TooLarge,
    error_body,
    gone,
    read_body,
    respond,
    respond_error,
    target,
)
from jobs.batches import MergedEvents, merge_answers
from jobs.connections import BrokenOff
from jobs.counters import Counters
from jobs.demand import Demand
from jobs.dispatch import Dispatcher, Job, Limits, Taken
from jobs.forward import forward
from jobs.parking import Unserved
from jobs.routing import Router
from jobs.streams import aborted, event
from jobs.upstream import Pool, UnknownModel, VersionFailed, request_headers, response_headers
from jobs.verdict import Answer, Blame, Elsewhere, renamed

log = logging.getLogger(__name__)

COMPLETIONS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose answers are judged: complete, with as many logprobs as tokens."""

T = TypeVar("T")


class Completions:
    """The application. `headers` open the engines (`jobs.http.upstream_headers`)."""

    def __init__(
        self,
        pool: Pool,
        headers: Mapping[str, str],
        limits: Limits | None = None,
        router: Router | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._pool = pool
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._limits = limits or Limits()
        self._dispatcher = Dispatcher(pool, self._limits, router, counters)
        self._counters = self._dispatcher.counters
        self._warned = False

    def close(self) -> None:
        """Closes the idle sockets to engines."""
        self._dispatcher.close()

    def snapshot(self) -> dict[str, Any]:
        """Counts since the start: `completions` and `routing` as in the status, and `engines` by name."""
        parking, router, engines = self._dispatcher.parking, self._dispatcher.router, self._dispatcher.engines
        parked = {"parked": parking.parked, "parked_total": parking.parked_total, "parked_s": parking.parked_s}
        return {
            "completions": {**self._counters.completions(), **parked},
            "routing": {
                **self._counters.routing(),
                "tokens": {name: engine.tokens for name, engine in engines.items()},
            },
            "engines": {
                name: {
                    "in_flight": router.in_flight(name),
                    "outstanding_tokens": router.outstanding_tokens(name),
                    **asdict(engines[name]),
                }
                for name in sorted({*router.engines(), *engines})
            },
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "no websockets here"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._limits.max_body_bytes)
        except ClientGone:
            return
        except TooLarge:
            text = f"The body is longer than proxy.max_body_bytes = {self._limits.max_body_bytes} allows. Raise it."
            await respond_error(send, 413, text, "RequestEntityTooLarge")
            return
        demand = Demand.read(body) if scope["method"] == "POST" else Demand(body)
        judged = scope["path"] in COMPLETIONS and scope["method"] == "POST"
        name = None
        try:
            if judged or demand.model is not None:
                name = self._pool.resolve(demand.model)
        except UnknownModel as error:
            if judged:
                await respond_error(send, 404, str(error), "NotFoundError")
                return
        if name is None:
            await _while_there(receive, forward(self._dispatcher, self._headers, scope, body, send))
            return
        self._counters.asked += 1
        self._pool.begin(name)
        try:
            if await _while_there(receive, self._complete(scope, demand, name, judged, send)):
                self._counters.answered += 1
            else:
                self._counters.cancelled += 1
        except Broken:
            self._counters.lost += 1
        except (Unserved, VersionFailed) as error:
            self._counters.lost += 1
            await respond_error(send, 503, str(error), type(error).__name__)
        except BaseException:
            self._counters.lost += 1
            raise
        finally:
            self._pool.end(name)

    async def _complete(self, scope: Scope, demand: Demand, name: str, judged: bool, send: Send) -> None:
        prompts = len(demand.prompts()) if scope["path"] == "/v1/completions" else 0
        if prompts > self._limits.max_batch:
            text = f"{prompts} prompts are more than proxy.max_batch = {self._limits.max_batch} allows. Raise it."
            await respond_error(send, 400, text, "BadRequestError")
        elif prompts and demand.stream:
            await self._stream_batch(self._jobs(scope, demand, name, prompts), demand.choices, send)
        elif prompts:
            await self._answer_batch(self._jobs(scope, demand, name, prompts), demand.choices, send)
        elif demand.stream:
            await self._stream(self._job(scope, demand, name, judged), send)
        else:
            answer = await self._answer(self._job(scope, demand, name, judged))
            await respond(send, answer.status, answer.headers, answer.body)

    def _jobs(self, scope: Scope, demand: Demand, name: str, prompts: int) -> list[Job]:
        jobs = []
        for index in range(prompts):
            job = self._job(scope, demand.single(index), name, True)
            # One engine may get several of them at a time, and each needs an id of its own there.
            own = b"-%d" % index
            headers = [(key, value + own if key == b"x-request-id" else value) for key, value in job.headers]
            jobs.append(replace(job, headers=headers))
        return jobs

    def _job(self, scope: Scope, demand: Demand, name: str, judged: bool) -> Job:
        edits: dict[str, Any] = {}
        model = demand.model
        if model is not None and model != name:
            edits["model"] = name
        max_tokens = demand.max_tokens
        limit, prompt_tokens = self._pool.max_model_len(), demand.prompt_tokens()
        if limit and prompt_tokens and max_tokens and prompt_tokens < limit < prompt_tokens + max_tokens:
            max_tokens = edits["max_tokens"] = limit - prompt_tokens
            self._warn(prompt_tokens, limit)
        return Job(
            name,
            model if model is not None else self._pool.public_name(name),
            target(scope),
            demand.spliced(edits) if edits else demand.body,
            request_headers(scope["headers"], self._headers, identity=True),
            demand.prefix(name) if judged else None,
            max_tokens,
            demand.choices,
            judged,
        )

    def _warn(self, prompt_tokens: int, limit: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "max_tokens is cut to what fits: a prompt of %d tokens and max_model_len = %d leave less than asked. "
                "Lower trainer.max_completion_length or raise replica.vllm.max_model_len. Said once.",
                prompt_tokens,
                limit,
            )

    async def _answer(self, job: Job) -> Answer:
        taken = await self._dispatcher.dispatch(job, lambda response: take_answer(response, job))
        self._settle(taken, taken.value)
        return taken.value

    def _settle(self, taken: Taken[Any], answer: Answer) -> None:
        if answer.status < 400:
            self._dispatcher.finished(taken.decision, answer.tokens)
        else:
            self._dispatcher.cancelled(taken.decision)

    async def _answer_batch(self, jobs: list[Job], choices: int, send: Send) -> None:
        async def one(job: Job) -> Answer:
            answer = await self._answer(job)
            if answer.status >= 400:
                raise Refused(answer)
            return answer

        try:
            answers = await _all(one(job) for job in jobs)
        except Refused as refused:
            answer = refused.answer
            await respond(send, answer.status, answer.headers, answer.body)
            return
        body = merge_answers([answer.body for answer in answers], choices)
        await respond(send, answers[0].status, answers[0].headers, body)

    async def _stream(self, job: Job, send: Send) -> None:
        taken = await self._dispatcher.dispatch(job, lambda response: take_stream(response, job))
        opened = taken.value
        if isinstance(opened, Answer):
            self._settle(taken, opened)
            await respond(send, opened.status, opened.headers, opened.body)
            return

        async def pass_on(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            await send(_stream_start(opened))
            await self._relay(Taken(opened, taken.decision), job, pass_on)
            await send({"type": "http.response.body", "body": b""})
        except Elsewhere as elsewhere:
            await _break_off(elsewhere, send)
        finally:
            opened.response.close()
            self._dispatcher.cancelled(taken.decision)

    async def _stream_batch(self, jobs: list[Job], choices: int, send: Send) -> None:
        opened: list[Taken[Opened]] = []

        async def start(job: Job) -> Taken[Opened]:
            taken = await self._dispatcher.dispatch(job, lambda response: take_stream(response, job))
            if isinstance(taken.value, Answer):
                self._settle(taken, taken.value)
                raise Refused(taken.value)
            stream = Taken(taken.value, taken.decision)
            opened.append(stream)
            return stream

        merged = MergedEvents(len(jobs), choices)
        turn = asyncio.Lock()

        async def relay(prompt: int, taken: Taken[Opened]) -> None:
            async def pass_on(events: bytes) -> None:
                async with turn:
                    for piece in merged.feed(prompt, events):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})

            await self._relay(taken, jobs[prompt], pass_on)

        try:
            # Nothing is sent before every prompt has its first event: until then one engine's refusal is the answer.
            streams = await _all(start(job) for job in jobs)
            await send(_stream_start(streams[0].value))
            await _all(relay(prompt, taken) for prompt, taken in enumerate(streams))
            await send({"type": "http.response.body", "body": b""})
        except Refused as refused:
            answer = refused.answer
            await respond(send, answer.status, answer.headers, answer.body)
        except Elsewhere as elsewhere:
            await _break_off(elsewhere, send)
        finally:
            for taken in opened:
                taken.value.response.close()
                self._dispatcher.cancelled(taken.decision)

    async def _relay(self, taken: Taken[Opened], job: Job, pass_on: Callable[[bytes], Awaitable[None]]) -> None:
        """Passes an opened stream on to its end.

        Raises:
            Elsewhere: it was cut off. It is too late to ask another engine.
        """
        engine = taken.decision.engine
        events = taken.value.events
        pieces = taken.value.first
        try:
            with self._dispatcher.guard(engine):
                while pieces:
                    if aborted(pieces):
                        raise self._blamed(engine, "finish_reason abort")
                    await pass_on(renamed(pieces, job.name, job.public))
                    pieces = await events.next()
        except BrokenOff as error:
            raise self._blamed(engine, f"the stream broke: {error}") from error
        if job.judged and not events.done:
            raise self._blamed(engine, "the stream ended before [DONE]")
        self._dispatcher.finished(taken.decision, events.tokens)

    def _blamed(self, engine: str, reason: str) -> Elsewhere:
        self._pool.failed(engine, reason)
        return Elsewhere(reason, Blame.ENGINE)


class Refused(Exception):
    """An engine's own verdict on one prompt of a batch, and so on all of it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__(str(answer.status))


class Broken(Exception):
    """A response was begun and cannot be completed: the connection has to end without a proper end."""


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work as long as the client is there; returns whether it was done."""
    task = asyncio.current_task()
    assert task
    left = False

    async def watch() -> None:
        nonlocal left
        await gone(receive)
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
    return not left


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order; when one fails the others are ended before its error is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _stream_start(opened: Opened) -> dict[str, Any]:
    headers = response_headers(opened.response.headers, frozenset({b"content-length"}))
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _break_off(elsewhere: Elsewhere, send: Send) -> None:
    """Tells the client in an event that the stream is incomplete, and sees to it that the transfer has no proper end.

    Raises:
        Broken: always.
    """
    payload = error_body(502, f"The engine broke off: {elsewhere.reason}", "EngineFailed")
    await send({"type": "http.response.body", "body": event(payload), "more_body": True})
    raise Broken from elsewhere
