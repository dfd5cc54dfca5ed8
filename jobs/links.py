"""The links to the engines: looks after each of them, has it do what the fleet wants, and tells the fleet what came
of it.

Two tasks for each engine: one asks for its state, the other carries out its actions, so that a load that hangs hides
no death. The wire is that of `jobs.middleware`.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp

from jobs import proof
from jobs.engine import BASE, Action, EngineState, Facts, Load, Prove, Unload
from jobs.fleet import Event
from jobs.manifest import manifest_key
from jobs.names import parse_wire
from jobs.pool import FleetPool
from jobs.publish import Publisher
from jobs.upstream import open_session

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often an engine's state is asked for. A failed completion is noticed at once, without it."""
POLL_TIMEOUT_S = 10.0
"""A server that is silent for so long hangs. vLLM's loop is busy for up to a second with a few hundred streams."""
TICK_S = 0.1
"""How late a deadline or the end of a back-off may be noticed."""
CANARY_TIMEOUT_S = 120.0
"""A canary waits in the engine's queue like every completion."""
UNLOAD_TIMEOUT_S = 30.0
"""An unload only forgets a name (milliseconds)."""
UNKNOWN_ERROR_TRIES = 3
"""How often a load is sent again after a 5xx whose words are not known: the bytes are verified, so it seldom helps."""

PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a load or a canary after which another try may work: gateways, throttling, an adapter not visible yet."""
LASTING_WORDS = (
    "is greater than max_lora_rank",
    "doesn't contain tensors",
    "Error while deserializing header",
    "modules_to_save",
    "does not yet support DoRA",
)
"""From vLLM 0.31's 500 answers to a load (measured): the adapter is what it is, and stays so."""


class Refusal(Exception):
    """The engine answered with an error. `lasting`: the same request can never work on this boot of it."""

    def __init__(self, words: str, lasting: bool, missing: bool = False) -> None:
        super().__init__(words)
        self.lasting, self.missing = lasting, missing


class Links:
    """All engines of one fleet. `in_flight` tells how many completions an engine has."""

    def __init__(
        self, pool: FleetPool, publisher: Publisher, headers: Mapping[str, str], in_flight: Callable[[str], int]
    ) -> None:
        self.pool, self.publisher, self._in_flight = pool, publisher, in_flight
        self._headers = {**headers, "content-type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._pokes: dict[str, asyncio.Event] = {}
        self._bases: dict[str, tuple[str, proof.Answer]] = {}
        self._proofs: dict[str, dict[str, tuple[str, proof.Proof]]] = {}
        pool.observers.append(self._observe)

    async def run(self) -> None:
        """Looks after the engines until it is cancelled."""
        async with open_session(reuse=False) as self._session:
            try:
                while True:
                    self.pool.tick()
                    self._look_after()
                    await asyncio.sleep(TICK_S)
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def replace(self, urls: Mapping[str, str]) -> None:
        """The replica set is now this one: URLs by engine name. Those that are not in it are drained."""
        with self.pool.telling() as fleet:
            now = self.pool.now()
            for name, url in urls.items():
                fleet.added(name, url.rstrip("/"), now)
            for name, engine in fleet.engines.items():
                if name not in urls and not engine.leaving:
                    log.info("replica %s leaves the set", name)
                    fleet.removed(name, now)
        self._look_after()

    def _look_after(self) -> None:
        if self._session is None:
            return
        for name, engine in self.pool.fleet.engines.items():
            if engine.state is not EngineState.GONE:
                self._keep(name, "watch", self._watch)
                self._keep(name, "work", self._work)
            if engine.state is EngineState.DRAINING and not self._in_flight(name):
                with self.pool.telling() as fleet:
                    fleet.drained(name, self.pool.now())

    def _keep(self, name: str, kind: str, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Starts one of an engine's tasks if it is not running: an engine may come back before both have ended."""
        task = self._tasks.get((name, kind))
        if task is not None and not task.done():
            return
        if task is not None and not task.cancelled() and (error := task.exception()):
            log.error("replica %s: its %s task failed", name, kind, exc_info=error)
        self._tasks[name, kind] = asyncio.create_task(work(name), name=f"{kind} of replica {name}")

    def _observe(self, event: Event) -> None:
        if event.kind in ("left", "given up"):
            engine = self.pool.fleet.engines[event.name]
            log.warning("replica %s is %s: %s", event.name, engine.state, engine.reason)
            if poke := self._pokes.get(event.name):
                poke.set()
        elif event.kind in ("retired", "failed"):
            self._proofs.pop(event.name, None)

    # State

    async def _watch(self, name: str) -> None:
        poke = self._pokes.setdefault(name, asyncio.Event())
        while self.pool.fleet.engines[name].state is not EngineState.GONE:
            poke.clear()
            await self._ask(name)
            try:
                async with asyncio.timeout(POLL_S):
                    await poke.wait()
            except TimeoutError:
                pass

    async def _ask(self, name: str) -> None:
        """Asks an engine for its state and tells the fleet."""
        asked_at, was = self.pool.now(), self.pool.fleet.engines[name].state
        try:
            answer = await self._call(name, "GET", "/asyncgrpo/replica", None, POLL_TIMEOUT_S)
            if not answer.get("ready"):
                raise Refusal("it is starting", lasting=False)
            facts = Facts(**{field: answer[field] for field in Facts.__dataclass_fields__})
            inventory = {str(wire): str(digest or "") for wire, digest in answer["adapters"].items()}
            boot_id = str(answer["boot_id"])
        except (Refusal, KeyError, TypeError, AttributeError) as error:
            words = str(error) if isinstance(error, Refusal) else f"not a replica's state: {error!r}"
            with self.pool.telling() as fleet:
                fleet.unreachable(name, words, self.pool.now())
        else:
            with self.pool.telling() as fleet:
                fleet.answered(name, boot_id, facts, inventory, asked_at, self.pool.now())
        if (now := self.pool.fleet.engines[name].state) is not was:
            log.info("replica %s: %s -> %s", name, was, now)

    # Actions

    async def _work(self, name: str) -> None:
        while self.pool.fleet.engines[name].state is not EngineState.GONE:
            if action := self.pool.fleet.take(name, self.pool.now()):
                await self._carry_out(action)
            else:
                await self.pool.changed(TICK_S)

    async def _carry_out(self, action: Action) -> None:
        """Does an action, or gives it up when nobody wants it any more."""
        work = asyncio.create_task(self._do(action))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=TICK_S)
                if not work.done() and not self.pool.fleet.still_wanted(action):
                    work.cancel()
                    await asyncio.wait({work})
            work.result()
        except asyncio.CancelledError:
            if not work.cancelled():
                work.cancel()
                raise
            self._tell_failure(action, Refusal("given up", lasting=False))
        except Refusal as refusal:
            self._tell_failure(action, refusal)

    def _tell_failure(self, action: Action, refusal: Refusal) -> None:
        what = f"{type(action).__name__.lower()} {action.wire or 'the base model'}"
        log.warning("replica %s did not %s: %s", action.engine, what, refusal)
        with self.pool.telling() as fleet:
            now = self.pool.now()
            if refusal.lasting and action.wire != BASE and not isinstance(action, Unload):
                fleet.refused(action, str(refusal), now)
            else:
                fleet.lagging(action, str(refusal), now)
            if refusal.missing:
                fleet.missing(action.engine, action.wire, now)

    async def _do(self, action: Action) -> None:
        if isinstance(action, Load):
            await self._load(action)
        elif isinstance(action, Prove):
            await self._prove(action)
        elif isinstance(action, Unload):
            await self._unload(action)

    async def _load(self, action: Load) -> None:
        name = parse_wire(action.wire)
        assert name is not None
        key = manifest_key(name.run, name.attempt, name.version)
        body = {"lora_name": action.wire, "lora_path": f"manifest:{key}", "load_inplace": False}
        started = time.monotonic()
        tries = self.pool.fleet.engines[action.engine].holding(action.wire).attempts
        timeout_s = self.pool.fleet.load_deadline_s
        try:
            await self._call(action.engine, "POST", "/v1/load_lora_adapter", body, timeout_s, tries)
        except Refusal as refusal:
            # The replica's middleware binds a name to one digest, so one that is there is the right one.
            if "has already been loaded" not in str(refusal):
                raise
        seconds = time.monotonic() - started
        with self.pool.telling() as fleet:
            fleet.loaded(action, seconds, self.pool.now())

    async def _prove(self, action: Prove) -> None:
        fleet = self.pool.fleet
        body = proof.request(action.wire or fleet.model or "")
        answered = await self._call(action.engine, "POST", "/v1/completions", body, CANARY_TIMEOUT_S)
        try:
            answer = proof.parse(answered)
        except proof.ProofError as error:
            raise Refusal(str(error), lasting=False) from error
        if action.wire == BASE:
            # The first of a boot counts: on a CPU, vLLM 0.31 gives a base request that shares a batch with an adapter's
            # the adapter in its last slot (measured, bit for bit). A later one only shows that the engine answers.
            if self._bases.get(action.engine, ("",))[0] != action.boot_id:
                self._bases[action.engine] = (action.boot_id, answer)
        elif words := self._judge(action, answer):
            raise Refusal(words, lasting=True)
        with self.pool.telling():
            fleet.proved(action, self.pool.now())
        if action.wire != BASE:
            self._judge_others(action)

    def _judge(self, action: Prove, answer: proof.Answer) -> str | None:
        boot_id, base = self._bases[action.engine]
        if boot_id != action.boot_id:  # it went while the canary was under way; the fleet forgets this result
            return None
        mine = proof.Proof(answer, base)
        words = self._verdict(action.wire, action.engine, mine)
        if words is None:
            self._proofs.setdefault(action.wire, {})[action.engine] = (boot_id, mine)
        return words

    def _judge_others(self, action: Prove) -> None:
        """A version that was too weak to show on one engine may have shown on this one."""
        for name, (_, theirs) in self._believed(action.wire).items():
            if name != action.engine and (words := self._verdict(action.wire, name, theirs)):
                log.error("replica %s: %s: %s", name, action.wire, words)
                del self._proofs[action.wire][name]
                with self.pool.telling() as fleet:
                    fleet.disproved(name, action.wire, words, self.pool.now())

    def _verdict(self, wire: str, engine: str, mine: proof.Proof) -> str | None:
        others = [theirs for name, (_, theirs) in self._believed(wire).items() if name != engine]
        strength = self.publisher.versions[wire].manifest.strength
        return proof.judge(mine, others, strength, self.pool.fleet.dtype or "")

    def _believed(self, wire: str) -> dict[str, tuple[str, proof.Proof]]:
        """Proofs of engines that still are in the boot in which they gave them."""
        engines, proofs = self.pool.fleet.engines, self._proofs.get(wire, {})
        return {name: (boot, theirs) for name, (boot, theirs) in proofs.items() if engines[name].boot_id == boot}

    async def _unload(self, action: Unload) -> None:
        try:
            body = {"lora_name": action.wire}
            await self._call(action.engine, "POST", "/v1/unload_lora_adapter", body, UNLOAD_TIMEOUT_S)
        except Refusal as refusal:
            if "cannot be found" not in str(refusal):
                raise
        with self.pool.telling() as fleet:
            fleet.unloaded(action, self.pool.now())

    async def _call(
        self, engine: str, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, tries: int = 0
    ) -> Any:
        """The JSON that an engine answers with 200, None if it is no JSON.

        Raises:
            Refusal: it did not, in its own words.
        """
        assert self._session is not None
        url = self.pool.url(engine) + path
        data = json.dumps(body).encode() if body is not None else None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, url, data=data, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                text = (await response.read()).decode(errors="replace")
        except TimeoutError as error:
            raise Refusal(f"no answer within {timeout_s:g} s", lasting=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Refusal(f"{type(error).__name__}: {error}", lasting=False) from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if response.status != 200:
            raise refusal_of(response.status, _words(answer) or text.strip()[:500], tries)
        return answer


def refusal_of(status: int, words: str, tries: int = 0) -> Refusal:
    """What an answer that is not 200 means. `tries`: how often the same load was sent, this time included.

    A mount that lags makes vLLM answer 404 "No adapter found"; "does not exist" is a completion for a name it does not
    hold; any other 404 is an endpoint that is not there.
    """
    if status == 404 and words == "Not Found":
        return Refusal("start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: it has no such endpoint", lasting=True)
    words = words or f"status {status} without a word"
    missing = status == 404 and "does not exist" in words
    if missing or status in PASSING or (status == 404 and "No adapter found" in words):
        return Refusal(words, lasting=False, missing=missing)
    if status >= 500:
        return Refusal(words, lasting=tries >= UNKNOWN_ERROR_TRIES or any(known in words for known in LASTING_WORDS))
    return Refusal(words, lasting=True)


def _words(answer: Any) -> str | None:
    """The message in an error of vLLM's, FastAPI's or a gateway's shape."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error", answer.get("detail", answer.get("message")))
    words = error.get("message") if isinstance(error, dict) else error
    return str(words)[:2000] if words else None
