"""The control plane: what TRL, or any other client, sees of the run as one vLLM server.

/pause and /resume are answered here: versions have names of their own, so nothing has to stop. A load publishes the
adapter and is acknowledged as `ack` says; an unload is acknowledged at once, and reaches an engine when no completion
under that name is left. Answers are vLLM's (0.31), and never 404 to a load, which TRL takes for a server without
adapters.
"""

import asyncio
import json
import logging
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from jobs.asgi import error_body
from jobs.errors import AsyncgrpoError, BucketError, ConfigError
from jobs.fleet import Event
from jobs.manifest import Manifest
from jobs.names import WireName, parse_policy
from jobs.pool import LOOK_AGAIN_S, FleetPool
from jobs.publish import Publisher
from jobs.version import VersionRefused, VersionState

log = logging.getLogger(__name__)

SYNC_DEADLINE_S = 1700.0
"""A load is answered within this, whatever happens: TRL gives up after 1800 s, without a reason."""
MANIFEST = "manifest:"


class LoadFailed(AsyncgrpoError):
    """A load that was not acknowledged; the message holds the replicas' own words."""


class Control:
    """The endpoints. `name` and `boot_id` are what this proxy calls itself to a proxy in front of it."""

    def __init__(self, pool: FleetPool, publisher: Publisher, name: str, boot_id: str) -> None:
        self._pool, self._publisher, self._fleet = pool, publisher, pool.fleet
        self._identity = {"replica": name, "engine": "proxy", "boot_id": boot_id}
        self._was_ready = False
        self._turn = asyncio.Lock()
        pool.observers.append(self._keep_books)

    def routes(self) -> list[Route]:
        """Every path that is not a completion's."""
        return [
            Route("/health", self.health),
            Route("/server_info", self.server_info),
            Route("/v1/models", self.models),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/asyncgrpo/replica", self.replica),
        ]

    async def health(self, request: Request) -> Response:
        """200 as soon as TRL can be told what its server offers: it asks before the start only, loads its model while
        the first engine starts, and completions that come too early wait.

        The body says `ok`, `degraded` (some engine is not ready), `parking` (none is any more) or `starting` (none was
        yet).
        """
        engines = [engine for engine in self._fleet.engines.values() if engine.state != "gone"]
        ready = sum(engine.state == "ready" for engine in engines)
        self._was_ready = self._was_ready or ready > 0
        if ready:
            status = "ok" if ready == len(engines) else "degraded"
        else:
            status = "parking" if self._was_ready else "starting"
        replicas = {engine.name: {"state": engine.state, "reason": engine.reason} for engine in engines}
        told = self._fleet.promise() is not None
        return JSONResponse({"status": status, "replicas": replicas}, 200 if told else 503)

    async def server_info(self, request: Request) -> Response:
        """The part of vLLM's configuration that holds for every engine: the smallest of each number."""
        facts = self._fleet.promise()
        if facts is None:
            return _error(503, "No engine is ready.", "ServiceUnavailable")
        config = {
            "model_config": {"model": facts.model, "max_model_len": facts.max_model_len, "dtype": facts.dtype},
            "lora_config": {"max_loras": facts.max_loras, "max_lora_rank": facts.max_lora_rank},
            "parallel_config": {"data_parallel_size": 1},
        }
        return JSONResponse(
            {"vllm_config": config if request.query_params.get("config_format") == "json" else str(config)}
        )

    async def models(self, request: Request) -> Response:
        """The base model and the live versions under TRL's names."""
        facts = self._fleet.promise()
        if facts is None:
            return _error(503, "No engine is ready.", "ServiceUnavailable")
        cards = [_card(facts.model, facts.model, None, facts.max_model_len)]
        for version in self._fleet.live():
            cards.append(_card(self._pool.public_name(version.wire), version.wire, facts.model, None))
        return JSONResponse({"object": "list", "data": cards})

    async def pause(self, request: Request) -> Response:
        """Nothing is paused."""
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Nothing was paused."""
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Never."""
        return JSONResponse({"is_paused": False})

    async def replica(self, request: Request) -> Response:
        """This proxy as the engine of a proxy in front of it. It holds what is live here."""
        facts = self._fleet.promise()
        ready = facts is not None and bool(self._fleet.ready())
        adapters = {version.wire: version.digest for version in self._fleet.live()}
        return JSONResponse({**self._identity, **(vars(facts) if facts else {}), "adapters": adapters, "ready": ready})

    async def load(self, request: Request) -> Response:
        """Publishes the adapter that TRL saved, or takes over what a proxy in front of this one published."""
        body = await _json(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if body.get("load_inplace"):
            words = f"load_inplace = true: {name!r} stands for one adapter for ever. Use another name."
            return _error(400, words, "InvalidUserInput")
        if name == self._fleet.model:
            return _error(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        try:
            async with asyncio.timeout(SYNC_DEADLINE_S):
                await self._load(name, path)
        except (ConfigError, VersionRefused) as error:
            return _error(400, str(error), "BadRequestError")
        except BucketError as error:
            return _error(503, str(error), "AdapterNotVisible")
        except LoadFailed as error:
            return _error(500, f"Loading lora {name} failed: {error}", "InternalServerError")
        except TimeoutError:
            words = f"Loading lora {name} took longer than {SYNC_DEADLINE_S:g} s: {self._obstacle()}."
            with self._pool.telling() as fleet:
                fleet.abandoned(self._wire(name), words, self._pool.now())
            return _error(504, words, "InternalServerError")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Lets a version go. The engines are told later: completions under it may be in flight."""
        name = (await _json(request)).get("lora_name")
        if not isinstance(name, str) or not name:
            words = "'lora_name' needs to be provided to unload a LoRA adapter."
            return _error(400, words, "InvalidUserInput")
        wire = self._wire(name)
        version = self._fleet.versions.get(wire)
        while version and version.state is VersionState.PUBLISHING:  # like vLLM, which serialises by name
            await self._pool.changed(LOOK_AGAIN_S)
        with self._pool.telling() as fleet:
            retired = fleet.retire(wire, self._pool.now())
        if not retired:
            return _error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _load(self, name: str, path: str) -> None:
        """Returns when the load is to be acknowledged.

        Raises:
            ConfigError, VersionRefused: it can never be.
            BucketError: the bucket did not take it in time.
            LoadFailed: the replicas did not take it, in their own words.
        """
        started = time.monotonic()
        wire = self._wire(name)
        async with self._turn:
            if path.startswith(MANIFEST):
                published = await self._publisher.adopt(wire, path.removeprefix(MANIFEST))
                await self._announce(published.manifest, None)
            else:
                await self._announce(await self._describe(name, path), path)
            version = self._fleet.versions[wire]
            while version.state is VersionState.PUBLISHING:
                await self._pool.changed(LOOK_AGAIN_S)
        if version.state is VersionState.FAILED:
            raise LoadFailed(str(version.words))
        log.info("%s is %s after %.2f s", wire, version.state, time.monotonic() - started)

    async def _describe(self, name: str, path: str) -> Manifest:
        number = parse_policy(name)
        if number is None:
            raise ConfigError(
                f"lora_name = {name!r}: expected {self._pool.public_name(self._wire('trl-policy-v1'))!r} ..."
            )
        facts = self._fleet.promise()
        max_rank = facts.max_lora_rank if facts else None
        return await self._publisher.describe(number, path, self._fleet.model or "", max_rank)

    async def _announce(self, manifest: Manifest, path: str | None) -> None:
        """Makes the version known to the fleet and, if it comes from a directory, durable."""
        wire = manifest.wire_name
        with self._pool.telling() as fleet:
            version = fleet.publishing(wire, manifest.digest, self._pool.now())
        if version.state is not VersionState.PUBLISHING:
            return  # an identical repeat
        try:
            if path is not None and wire not in self._publisher.versions:
                await self._publisher.marked()
                await self._publisher.upload(manifest, path)
            elif path is not None:
                self._publisher.unmark(wire)
        except BaseException as error:
            with self._pool.telling() as fleet:
                fleet.abandoned(wire, str(error) or "given up", self._pool.now())
            raise
        with self._pool.telling() as fleet:
            fleet.published(wire, self._pool.now())

    def _obstacle(self) -> str:
        """Why a load may take so long: an engine that is there has its own deadline."""
        states = ", ".join(f"replica {e.name} is {e.state}: {e.reason}" for e in self._fleet.engines.values())
        return (
            "the loads before it are not done" if self._fleet.ready() else f"no replica is ready ({states or 'none'})"
        )

    def _wire(self, name: str) -> str:
        number = parse_policy(name)
        return str(WireName(self._fleet.run, self._fleet.attempt, number)) if number else name

    def _keep_books(self, event: Event) -> None:
        """Keeps in the bucket what must outlive this process: a rollback, or an unload, is not lost with it."""
        if event.kind == "forgotten":
            self._publisher.versions.pop(event.name, None)
        elif event.kind == "retiring":
            self._publisher.mark(event.name, VersionState.RETIRED)
        elif event.kind == "failed":
            words = self._fleet.versions[event.name].words
            log.error("%s failed: %s", event.name, words)
            if event.name in self._publisher.versions:
                self._publisher.mark(event.name, VersionState.FAILED, words)


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """A model card with the fields of vLLM's."""
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _error(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse(error_body(status, message, kind), status)


def router(*routes: Route) -> Router:
    """The routes as one application."""
    return Router(list(routes), redirect_slashes=False)
