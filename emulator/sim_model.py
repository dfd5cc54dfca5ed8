"""What a simulated engine computes: a language of 64 tokens, what an adapter does to it, and a prefix cache.

The next token depends on the one before it alone, so a model is a table of 64 times 64 numbers: cheap enough for
thousands of completions at a time, and still a language model, whose log-probabilities agree between sampling and
scoring. Nothing here knows HTTP or time; only the standard library is needed.
"""

import json
import math
import random
import struct
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

STATES = 64
"""Tokens the language has: ids 0 to 62 and the end token, as state 63. Other tokens of a prompt fold onto these."""
SPREAD = 1.5
"""Standard deviation of the base model's logits: samples are as uncertain as those of an untrained tiny Qwen2."""
BLOCK_TOKENS = 16
"""vLLM's block: prompts share whole blocks of 16 tokens in the prefix cache (vLLM 0.31, `block_size`)."""
TEMPERATURES = 8
"""Temperatures a table is kept ready for."""

Weights = list[list[float]]


class Failed(Exception):
    """An adapter cannot be loaded; in vLLM's words, which hide paths. `missing` if there is none at all."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass
class Table:
    """One policy. `logits[p][t]` belongs to token t after token p."""

    logits: Weights
    _rows: dict[tuple[float, int], tuple[list[float], list[float]]] = field(default_factory=dict, repr=False)

    def row(self, previous: int, temperature: float) -> tuple[list[float], list[float]]:
        """Log-probabilities of all states after token `previous`, and their cumulated probabilities.

        Temperature 0 stands for 1 here: what is picked is then the largest, and its log-probability is the plain one.
        """
        at = (temperature or 1.0, previous % STATES)
        if at not in self._rows:
            if len(self._rows) >= TEMPERATURES * STATES:
                self._rows.clear()
            logits = [value / at[0] for value in self.logits[at[1]]]
            top = max(logits)
            total = top + math.log(sum(math.exp(value - top) for value in logits))
            logprobs = [value - total for value in logits]
            self._rows[at] = logprobs, list(accumulate(math.exp(value) for value in logprobs))
        return self._rows[at]


def base_table(model: str) -> Table:
    """The base model called `model`."""
    draw = random.Random(f"base {model}")
    return Table([[draw.gauss(0, SPREAD) for _ in range(STATES)] for _ in range(STATES)])


def adapted(base: Table, directory: Path, max_rank: int) -> Table:
    """The base model with the adapter in `directory`: its real tensors move the logits, and B = 0 leaves them.

    Raises:
        Failed: in vLLM 0.31's words for the same files.
    """
    try:
        config = json.loads((directory / "adapter_config.json").read_bytes())
    except FileNotFoundError:
        raise Failed("No adapter found for <path>", missing=True) from None
    except ValueError as error:
        raise Failed(str(error)) from error
    _check(config, max_rank)
    weights = directory / "adapter_model.safetensors"
    if not weights.is_file():
        raise Failed("<path> doesn't contain tensors")
    rank = int(config["r"])
    scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    logits = [list(row) for row in base.logits]
    for down, up in _modules(weights):
        for row, factor in zip(logits, down, strict=True):
            if factor:
                for token, value in enumerate(up):
                    row[token] += scale * factor * value
    return Table(logits)


def _check(config: dict[str, Any], max_rank: int) -> None:
    if config.get("modules_to_save"):
        raise Failed(
            'vLLM only supports modules_to_save being either None or ["classifier", "score"] for classification '
            f"models. Unsupported modules_to_save: {config['modules_to_save']}"
        )
    if config.get("use_dora"):
        raise Failed("vLLM does not yet support DoRA.")
    if config["r"] > max_rank:
        raise Failed(f"LoRA rank {config['r']} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        raise Failed("Adapter bias is not supported.")


def _modules(path: Path) -> Iterator[tuple[list[float], list[float]]]:
    """For each adapted matrix: what A makes of each previous token, and B of each next one; both have STATES numbers.

    Of A (rank, inputs) and B (outputs, rank) only the first STATES inputs and outputs are read, summed over the rank.
    """
    with path.open("rb") as file:
        header, start = _header(file, path.stat().st_size)
        for name, up in header.items():
            if ".lora_B" not in name:
                continue
            down = header[name.replace(".lora_B", ".lora_A")]
            rank, inputs = down["shape"]
            read = min(inputs, STATES)
            sums = [0.0] * read
            for index in range(rank):
                values = _floats(file, start, down, index * inputs, read)
                sums = [total + value for total, value in zip(sums, values, strict=True)]
            outputs = min(up["shape"][0], STATES)
            flat = _floats(file, start, up, 0, outputs * rank)
            ups = [sum(flat[row * rank : (row + 1) * rank]) for row in range(outputs)]
            yield _stretched(sums), _stretched(ups)


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file describes, and where their bytes start."""
    broken = "Error while deserializing header: "
    prefix = file.read(8)
    if len(prefix) < 8:
        raise Failed(broken + "header too small")
    (length,) = struct.unpack("<Q", prefix)
    if 8 + length > size:
        raise Failed(broken + "invalid header length")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise Failed(f"{broken}invalid JSON in header: {error}") from error
    header.pop("__metadata__", None)
    if 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0) != size:
        raise Failed(broken + "incomplete metadata, file not fully covered")
    return header, 8 + length


def _floats(file: BinaryIO, start: int, tensor: dict[str, Any], first: int, count: int) -> list[float]:
    """`count` numbers of a tensor from its number `first` on."""
    code, width = {"F32": ("f", 4), "F16": ("e", 2), "BF16": ("H", 2)}[tensor["dtype"]]
    file.seek(start + tensor["data_offsets"][0] + first * width)
    values = struct.unpack(f"<{count}{code}", file.read(count * width))
    if code == "H":  # a bfloat16 is the upper half of a float32
        values = struct.unpack(f"<{count}f", b"".join(struct.pack("<HH", 0, value) for value in values))
    return list(values)


def _stretched(values: list[float]) -> list[float]:
    return [values[index % len(values)] for index in range(STATES)]


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. `end` is the end token's id, `stop_ids` and `stops` what else ends a completion."""

    max_tokens: int
    temperature: float
    end: int
    ignore_end: bool = False
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """A completion. `rows[i]` are the log-probabilities of all states where `tokens[i]` was picked as `states[i]`."""

    tokens: list[int]
    states: list[int]
    rows: list[list[float]]
    finish_reason: str
    stop_reason: int | str | None = None
    cached_tokens: int = 0

    def cut(self, length: int, finish_reason: str) -> "Sampled":
        """Its first `length` tokens, ended for another reason."""
        kept = self.tokens[:length], self.states[:length], self.rows[:length]
        return Sampled(*kept, finish_reason, cached_tokens=self.cached_tokens)

    def logprobs(self) -> list[float]:
        """Log-probability of each token."""
        return [row[state] for row, state in zip(self.rows, self.states, strict=True)]


def sample(table: Table, previous: int, how: Sampling, draw: random.Random) -> Sampled:
    """Continues a prompt whose last token is `previous`."""
    tokens: list[int] = []
    states: list[int] = []
    rows: list[list[float]] = []
    written = ""
    for _ in range(how.max_tokens):
        logprobs, cumulated = table.row(previous, how.temperature)
        if how.temperature:
            state = min(bisect(cumulated, draw.random()), STATES - 1)
        else:
            state = max(range(STATES), key=logprobs.__getitem__)
        previous = how.end if state == STATES - 1 else state
        tokens.append(previous)
        states.append(state)
        rows.append(logprobs)
        if previous == how.end and not how.ignore_end:
            return Sampled(tokens, states, rows, "stop")
        if previous in how.stop_ids:
            return Sampled(tokens, states, rows, "stop", previous)
        if how.stops:
            written += text([previous])
            for stop in how.stops:
                if stop in written:
                    return Sampled(tokens, states, rows, "stop", stop)
    return Sampled(tokens, states, rows, "length")


def text(tokens: Sequence[int]) -> str:
    """What tokens read as: the tiny models' characters, from the space on. Special tokens read as nothing."""
    return "".join(chr(32 + token) if token < 95 else "\n" if token == 95 else "" for token in tokens)


def tokenize(written: str) -> list[int]:
    """Tokens of a text: one for each character, those outside of the alphabet folded onto it."""
    return [95 if char == "\n" else (ord(char) - 32) % 95 for char in written]


class PrefixCache:
    """Which blocks of which prompts are in the engine's memory.

    Whole blocks, each chained to the ones before it, seeded with the adapter's name. `capacity` in blocks; the block
    that was unused for longest goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, name: str, prompt: Sequence[int]) -> int:
        """Counts the prompt's tokens that are cached, and caches the others. The last token is always computed."""
        cached, hit, chain = 0, True, hash(name)
        for start in range(0, len(prompt) - len(prompt) % BLOCK_TOKENS, BLOCK_TOKENS):
            chain = hash((chain, tuple(prompt[start : start + BLOCK_TOKENS])))
            hit = hit and chain in self._blocks
            if hit and start + BLOCK_TOKENS < len(prompt):
                cached += BLOCK_TOKENS
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)
        return cached

    def clear(self) -> None:
        """Forgets everything, as a pause of a vLLM engine does."""
        self._blocks.clear()
