"""The state of a simulated engine: adapters and their slots, running sequences, the pause. Knows no HTTP."""

import asyncio
import hashlib
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from emulator.sim_faults import Fault, Faults
from emulator.sim_model import BLOCK_TOKENS, Failed, PrefixCache, Sampled, Sampling, Table, adapted, base_table, sample
from emulator.sim_requests import Completion, Limits, Refused
from jobs.manifest import FILES

EVENTS = 100_000
"""Most that the log keeps."""
ABORT = "abort"
"""Why a sequence ended: the engine was told to stop it. Any other cancellation means that its client left."""

Emit = Callable[[Sampled, int], None]


class EngineDead(Exception):
    """An adapter was evicted and its files are gone: the whole engine ends (measured, vLLM 0.31)."""


@dataclass(frozen=True)
class Settings:
    """A simulated engine's flags; those of vLLM under their names. A rate of 0 means that no time passes."""

    model: str
    served: str
    max_model_len: int = 2048
    max_num_seqs: int = 256
    enable_lora: bool = False
    max_loras: int = 1
    max_cpu_loras: int = 1
    max_lora_rank: int = 16
    dtype: str = "bfloat16"
    seed: int = 0
    prompt_tokens_details: bool = False
    kv_tokens: int = 1 << 20
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    load_s: float = 0.0
    vocabulary: int = 151_936
    end: int = 151_643

    def limits(self) -> Limits:
        """What requests are checked against."""
        return Limits(self.served, self.max_model_len, self.vocabulary, self.end)


@dataclass(frozen=True)
class Adapter:
    """A name that the front end knows. `number` is new with each load, and it is what the engine's slots hold."""

    number: int
    path: Path
    digest: str


class Engine:
    """One engine. All methods run on one event loop. `log` takes every event as a line of JSON."""

    def __init__(self, settings: Settings, log: IO[str] | None = None) -> None:
        self.settings = settings
        self.faults = Faults()
        self._log = log
        self.adapters: dict[str, Adapter] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.running: set[asyncio.Task[Sampled]] = set()
        self.peak = 0
        self.dead = False
        self._base = base_table(settings.served)
        self._slots: OrderedDict[int, Table] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._loads = 0
        self._unseeded = 0
        self._cache = PrefixCache(settings.kv_tokens // BLOCK_TOKENS)
        self._seats = asyncio.Semaphore(settings.max_num_seqs)
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def paused(self) -> bool:
        """Whether sequences wait for `resume`."""
        return not self._awake.is_set()

    def note(self, event: str, **values: Any) -> None:
        """Adds to the log, and to the file of it that outlives the engine."""
        self.events.append({"event": event, **values})
        if self._log is not None:
            self._log.write(json.dumps(self.events[-1]) + "\n")
            self._log.flush()

    async def load(self, name: str, path: str, in_place: bool) -> None:
        """Makes an adapter known and puts it in a slot.

        Raises:
            Refused: as vLLM refuses it.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._check_load(name, path, in_place)
            await asyncio.sleep(self.settings.load_s)
            try:
                table, digest = await asyncio.to_thread(self._read, Path(path))
            except Failed as error:
                if error.missing:
                    raise Refused(f"Loading lora {name} failed: {error}", 404, "NotFoundError") from error
                raise Refused(f"Call to add_lora method failed: {error}", 500, "InternalServerError") from error
            self._loads += 1
            self.adapters[name] = Adapter(self._loads, Path(path), digest)
            self._put(self._loads, table)

    def _check_load(self, name: str, path: str, in_place: bool) -> None:
        if not name or not path:
            raise Refused("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if name == self.settings.served:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            raise Refused(message, kind="InvalidUserInput")
        if name in self.adapters and not in_place:
            raise Refused(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind="InvalidUserInput",
            )

    async def unload(self, name: str) -> None:
        """Forgets the name; the adapter stays in its slot until others need it.

        Raises:
            Refused: there is no such name.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not name:
                message = "'lora_name' needs to be provided to unload a LoRA adapter."
                raise Refused(message, kind="InvalidUserInput")
            if self.adapters.pop(name, None) is None:
                raise Refused(f"The lora adapter '{name}' cannot be found.", 404, "NotFoundError")

    def pause(self, mode: str) -> None:
        """Stops generation. `abort` ends what runs, `keep` holds it, and both wipe the prefix cache."""
        self._awake.clear()
        self._cache.clear()
        if mode == "abort":
            self.abort()

    def resume(self) -> None:
        """Lets sequences go on."""
        self._awake.set()

    def abort(self) -> None:
        """Ends every sequence where it is: each is answered with what it has and `finish_reason` abort."""
        for task in self.running:
            task.cancel(ABORT)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._cache.clear()

    def start(self, ask: Completion, index: int, fault: Fault | None, emit: Emit | None) -> asyncio.Task[Sampled]:
        """Starts sequence `index` of a request (prompt by prompt, n for each). `emit` gets each token as it is due.

        Cancel the task when nobody waits for it any more; it raises EngineDead when the engine has ended.
        """
        prompt = ask.prompts[index // ask.n]
        seed = ask.seed
        if seed is None:
            self._unseeded += 1
            seed = hash((self.settings.seed, self._unseeded))
        adapter = None if fault and fault.base else self.adapters.get(ask.model)
        draw = random.Random(hash((seed, index % ask.n, tuple(prompt))))
        task = asyncio.create_task(self._sequence(ask, prompt, adapter, draw, fault, emit))
        self.running.add(task)
        self.peak = max(self.peak, len(self.running))
        task.add_done_callback(self.running.discard)
        return task

    def table(self, adapter: Adapter | None) -> Table:
        """The policy of an adapter, or the base; read again from the adapter's directory if its slot was taken.

        Raises:
            EngineDead: it was, and the files are gone.
        """
        if adapter is None:
            return self._base
        if adapter.number not in self._slots:
            try:
                self._put(adapter.number, adapted(self._base, adapter.path, self.settings.max_lora_rank))
            except Failed as error:
                self.dead = True
                raise EngineDead(str(error)) from error
        self._slots.move_to_end(adapter.number)
        return self._slots[adapter.number]

    async def _sequence(
        self,
        ask: Completion,
        prompt: list[int],
        adapter: Adapter | None,
        draw: random.Random,
        fault: Fault | None,
        emit: Emit | None,
    ) -> Sampled:
        settings = self.settings
        sampled, done = Sampled([], [], [], ABORT), 0
        try:
            async with self._seats:
                await self._awake.wait()
                table = self.table(adapter)
                cached = self._cache.take(ask.model, prompt)
                # Asked only to score a prompt, vLLM still makes one token, and does not show it.
                how = Sampling(
                    max(ask.max_tokens, 1), ask.temperature, settings.end, ask.ignore_end, ask.stop_ids, ask.stops
                )
                sampled = replace(sample(table, prompt[-1], how, draw), cached_tokens=cached)
                if fault and fault.finish_reason:
                    sampled = sampled.cut(len(sampled.tokens) // 2, fault.finish_reason)
                if settings.prefill_tokens_per_s:
                    await asyncio.sleep((len(prompt) - cached) / settings.prefill_tokens_per_s)
                pace = 1 / settings.decode_tokens_per_s if settings.decode_tokens_per_s else 0.0
                begun = asyncio.get_running_loop().time()
                try:
                    await self._decode(sampled, pace, emit)
                except asyncio.CancelledError:
                    done = int((asyncio.get_running_loop().time() - begun) / pace) if pace else 0
                    raise
        except asyncio.CancelledError as error:
            if error.args == (ABORT,):
                return sampled.cut(min(done, len(sampled.tokens)), ABORT)
            raise
        return sampled

    async def _decode(self, sampled: Sampled, pace: float, emit: Emit | None) -> None:
        """Lets the time of all tokens pass, at `pace` seconds for each; ends when the engine is not paused."""
        if emit is None:
            if pace:
                await asyncio.sleep(pace * len(sampled.tokens))
            await self._awake.wait()
            return
        for index in range(len(sampled.tokens)):
            if pace:
                await asyncio.sleep(pace)
            await self._awake.wait()
            emit(sampled, index)

    def _read(self, path: Path) -> tuple[Table, str]:
        return adapted(self._base, path, self.settings.max_lora_rank), digest(path)

    def _put(self, number: int, table: Table) -> None:
        self._slots[number] = table
        while len(self._slots) > max(self.settings.max_cpu_loras, self.settings.max_loras):
            self._slots.popitem(last=False)


def digest(directory: Path) -> str:
    """Digest of an adapter's files, as its manifest has it (`jobs.manifest.Manifest.digest`)."""
    lines = []
    for name in sorted(FILES):
        data = (directory / name).read_bytes()
        lines.append(f"{name} {len(data)} {hashlib.sha256(data).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def settings_of_model(directory: str) -> dict[str, Any]:
    """Vocabulary, end token and length of a model that lies in a directory; nothing for another name."""
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
    except OSError:
        return {}
    end = config.get("eos_token_id")
    found = {
        "vocabulary": config.get("vocab_size"),
        "end": end[0] if isinstance(end, list) else end,
        "max_model_len": config.get("max_position_embeddings"),
    }
    return {name: value for name, value in found.items() if value is not None}
