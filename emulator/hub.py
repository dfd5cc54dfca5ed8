"""The Hub's Jobs API over HTTP: what `huggingface_hub` and the `hf` command speak. No state of its own.

Routes, fields and errors: huggingface_hub 1.33.0 and 2.4.0 (`hf_api.py`, `_jobs_api.py`), which are the clients.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emulator.hardware import FLAVORS
from emulator.hub_buckets import HubBuckets, UnknownBucket
from emulator.jobs_state import BadRequest, Job, Owner, Stage, UnknownJob, parse_expose, parse_labels, parse_spec
from emulator.runner import Runner
from emulator.usage import Usage

KEEP_ALIVE_S = 30.0
"""Between comments in a quiet event stream. More than the 5 s after which a client that does not follow leaves."""
METRICS_EVERY_S = 1.0
PAGE_JOBS = 100
QUOTA_CALLS, QUOTA_WINDOW_S = 2500, 300.0
"""The Hub's API quota: 1,000 to 2,500 calls in 5 minutes by plan."""

InterruptLogs = Callable[[str, int], str | None]
"""Called with a Job's id and the number of events sent on this connection, after each: "end" ends the stream there,
"drop" breaks it in the middle of the next line."""
Interfere = Callable[[str, str], int | None]
"""Called with method and path *after* a request was served; a status it returns is answered instead of the truth."""


class Hub:
    """The ASGI application. `user` owns the token and is a member of `organization`; each has Jobs.

    `affordable` is how many Jobs may be alive before the account's credit is used up (402); None: any number.
    """

    def __init__(
        self,
        runner: Runner,
        buckets: HubBuckets,
        user: Owner,
        organization: Owner,
        token: str,
        quota_calls: int = QUOTA_CALLS,
    ) -> None:
        self.runner = runner
        self.user, self.organization = user, organization
        self.affordable: int | None = None
        self.keep_alive_s = KEEP_ALIVE_S
        self.interrupt_logs: InterruptLogs | None = None
        self.interfere: Interfere | None = None
        self._bearer = f"Bearer {token}"
        self._quota_calls = quota_calls
        self._calls: deque[float] = deque()
        job = "/api/jobs/{namespace}/{job_id}"
        self._app: ASGIApp = Starlette(
            routes=[
                Route("/api/whoami-v2", self.whoami),
                Route("/api/jobs/hardware", self.hardware),  # before {namespace}
                Route("/api/jobs/{namespace}", self.create, methods=["POST"]),
                Route("/api/jobs/{namespace}", self.list, methods=["GET"]),
                Route(job, self.inspect),
                Route(f"{job}/logs", self.logs),
                Route(f"{job}/metrics", self.metrics),
                Route(f"{job}/cancel", self.cancel, methods=["POST"]),
                Route(f"{job}/duplicate", self.duplicate, methods=["POST"]),
                Route(f"{job}/labels", self.labels, methods=["PUT"]),
                Route(f"{job}/expose", self.expose, methods=["PUT"]),
                *buckets.routes,
            ],
            exception_handlers={
                BadRequest: lambda _, error: _error(400, str(error)),
                UnknownJob: lambda _, error: _error(404, "Job not found"),
                UnknownBucket: lambda _, error: _error(404, "Bucket not found", {"X-Error-Code": "RepoNotFound"}),
                404: lambda _, error: _error(404, "Not found"),
                405: lambda _, error: _error(405, "Method not allowed"),
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token and the quota, then answer."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is None:
            send = self._with_quota(send)
        if refusal is None and self.interfere:
            await self._interfered(scope, receive, send)
        else:
            await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if given is None:
            return _error(401, "Invalid username or password.")
        if not hmac.compare_digest(given, self._bearer.encode()):
            message = "Invalid credentials in Authorization header"
            return _error(401, message, {"X-Error-Message": message})
        now = time.monotonic()
        while self._calls and self._calls[0] < now - QUOTA_WINDOW_S:
            self._calls.popleft()
        if len(self._calls) >= self._quota_calls:
            words = f"We had to rate limit you: {self._quota_calls} calls in {QUOTA_WINDOW_S:.0f} s."
            return _error(429, words, self._told_quota())
        self._calls.append(now)
        return None

    def _told_quota(self) -> dict[str, str]:
        """The headers by which every answer says how many calls are left."""
        wait_s = round(self._calls[0] + QUOTA_WINDOW_S - time.monotonic()) + 1
        return {
            "RateLimit": f'"api";r={self._quota_calls - len(self._calls)};t={wait_s}',
            "RateLimit-Policy": f'"fixed window";"api";q={self._quota_calls};w={QUOTA_WINDOW_S:.0f}',
        }

    def _with_quota(self, send: Send) -> Send:
        told = [(name.lower().encode(), value.encode()) for name, value in self._told_quota().items()]

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        return send_told

    async def _interfered(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def send_or_not(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and self.interfere:
                status = self.interfere(scope["method"], scope["path"])
                if status:
                    await _error(status, "fault injected at the Hub")(scope, receive, send)
            if not status:
                await send(message)

        await self._app(scope, receive, send_or_not)

    def _namespace(self, request: Request) -> str:
        namespace: str = request.path_params["namespace"]
        return self.user.name if namespace == "me" else namespace

    def _job(self, request: Request) -> Job:
        return self.runner.table.get(self._namespace(request), request.path_params["job_id"])

    async def whoami(self, request: Request) -> Response:
        """Who the token belongs to."""
        return JSONResponse(
            {
                **self.user.to_json(),
                "fullname": self.user.name,
                "isPro": True,
                "canPay": True,
                "orgs": [{**self.organization.to_json(), "fullname": self.organization.name, "roleInOrg": "write"}],
                "auth": {"type": "access_token", "accessToken": {"displayName": "emulator", "role": "write"}},
            }
        )

    async def hardware(self, request: Request) -> Response:
        """All flavors with their prices."""
        return JSONResponse([flavor.to_json() for flavor in FLAVORS.values()])

    async def create(self, request: Request) -> Response:
        """Start a Job."""
        namespace = self._namespace(request)
        owner = next((owner for owner in (self.user, self.organization) if owner.name == namespace), None)
        if owner is None:
            message = f"You do not have write access to the namespace {namespace}"
            return _error(403, message, {"X-Error-Message": message})
        spec = parse_spec(await _body(request))
        alive = sum(not job.stage.final for job in self.runner.table.all())
        if self.affordable is not None and alive >= self.affordable:
            return _error(402, "Pre-paid credit balance is insufficient: add more credits to use Jobs.")
        job = await self.runner.submit(owner, self.user, spec)
        return JSONResponse(job.to_json())

    async def list(self, request: Request) -> Response:
        """Jobs, newest first, that match every filter; `Link: rel=next` while there are more."""
        labels: dict[str, str] = {}
        for item in request.query_params.getlist("label"):
            key, equals, value = item.partition("=")
            if not equals:
                raise BadRequest(f'"label" must be key=value, got {item!r}')
            labels[key] = value
        stages = request.query_params.getlist("stage")
        if unknown := [stage for stage in stages if stage not in Stage.__members__]:
            raise BadRequest(f'"stage" must be one of {", ".join(Stage)}, got {unknown[0]!r}')
        jobs = self.runner.table.list(self._namespace(request), stages, labels)
        after = request.query_params.get("cursor")
        start = next((index + 1 for index, job in enumerate(jobs) if job.id == after), 0) if after else 0
        page = jobs[start : start + PAGE_JOBS]
        headers = {}
        if start + PAGE_JOBS < len(jobs):
            query = [(k, v) for k, v in request.query_params.multi_items() if k != "cursor"] + [("cursor", page[-1].id)]
            headers["Link"] = f'<{request.url.replace(query=urlencode(query))}>; rel="next"'
        return JSONResponse([job.to_json() for job in page], headers=headers)

    async def inspect(self, request: Request) -> Response:
        """One Job."""
        return JSONResponse(self._job(request).to_json())

    async def cancel(self, request: Request) -> Response:
        """End a Job; one that is over already stays as it is."""
        job = self._job(request)
        self.runner.cancel(job)
        return JSONResponse(job.to_json())

    async def duplicate(self, request: Request) -> Response:
        """Start a new Job with the specification of another, its secrets included."""
        job = self._job(request)
        again = await self.runner.submit(job.owner, self.user, job.spec, "duplicated-job")
        return JSONResponse(again.to_json())

    async def labels(self, request: Request) -> Response:
        """Replace all labels."""
        job = self._job(request)
        job.relabel(parse_labels((await _body(request)).get("labels")))
        return JSONResponse(job.to_json())

    async def expose(self, request: Request) -> Response:
        """Replace the exposed ports of a Job that is not over."""
        job = self._job(request)
        if job.stage.final:
            raise BadRequest("Job is not running")
        await self.runner.expose(job, parse_expose(await _body(request)))
        return JSONResponse(job.to_json())

    async def logs(self, request: Request) -> Response:
        """The log as events, from the start or the last `tail` lines, until the Job ends."""
        job = self._job(request)
        tail = request.query_params.get("tail")
        if tail is not None and not tail.isdecimal():
            raise BadRequest(f'"tail" must be a number of lines, got {tail!r}')
        return _events(self._log_events(job, int(tail) if tail else None))

    async def _log_events(self, job: Job, tail: int | None) -> AsyncIterator[str]:
        sent = 0
        async for event in self.runner.log(job).follow(tail, self.keep_alive_s):
            if event is None:
                yield ": keep-alive\n\n"
                continue
            yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
            sent += 1
            verdict = self.interrupt_logs(job.id, sent) if self.interrupt_logs else None
            if verdict == "end":
                return
            if verdict == "drop":
                yield 'data: {"data":"cut'
                raise ConnectionAbortedError("log stream dropped in the middle of a line, as asked")

    async def metrics(self, request: Request) -> Response:
        """What the Job uses, each second; 406 when it is over."""
        job = self._job(request)
        if job.stage.final:
            return _error(406, "Job is not running")
        return _events(self._metric_events(job))

    async def _metric_events(self, job: Job) -> AsyncIterator[str]:
        usage = Usage(job.id, job.spec.flavor)
        while not job.stage.final:
            if pids := await asyncio.to_thread(self.runner.pids, job):
                yield f"event: metric\ndata: {json.dumps(usage.measure(pids), separators=(',', ':'))}\n\n"
            await asyncio.sleep(METRICS_EVERY_S)


async def _body(request: Request) -> Any:
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequest("the body is not JSON") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _events(events: AsyncIterator[str]) -> Response:
    # huggingface_hub 2.4.0 takes an event later than this date for news; uvicorn's own date is up to a second old.
    headers = {"Cache-Control": "no-cache", "Date": formatdate(usegmt=True)}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)
