"""The manifest of a published adapter: what exactly a version's name stands for.

It is written after the adapter's files, so whoever can read it knows that they are all there, and it is signed with the
run's key, so a replica loads what the trainer published or nothing.
"""

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.errors import ConfigError
from jobs.names import WireName, wire_name

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""PEFT's own names for a saved LoRA adapter."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values vLLM 0.31 takes for --max-lora-rank (vllm/config/lora.py)."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
}
"""Fields of adapter_config.json with the values that vLLM can serve as an adapter. There is no other path to the
replicas, so anything else is an error. rsLoRA is fine: vLLM 0.31 reads `use_rslora` (vllm/lora/peft_helper.py) and
scales by it."""

_HEADS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out", "word_embeddings")


@dataclass(frozen=True)
class File:
    """One file of an adapter: bytes and hex digest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One version of the adapter.

    `strength` is an upper bound of how far the adapter moves any weight matrix (the largest over the modules of
    |alpha/r| * ||B|| * ||A||, Frobenius norms); it is 0 for an untrained adapter, whose B is zero, and then `zero` is
    True.
    """

    run: str
    attempt: int
    version: int
    base_model: str
    rank: int
    alpha: float
    strength: float
    files: dict[str, File]
    step: int | None = None
    signature: str = ""
    published_at: float | None = field(default=None, compare=False)

    @property
    def wire_name(self) -> str:
        """What the version is called on the wire."""
        return wire_name(self.run, self.attempt, self.version)

    @property
    def zero(self) -> bool:
        """Whether the adapter changes nothing."""
        return self.strength == 0.0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """sha256 over the files' names, sizes and digests: two adapters with one digest are the same adapter."""
        lines = [f"{name} {file.size} {file.sha256}\n" for name, file in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def sign(self, key: str) -> "Manifest":
        """The same manifest with its HMAC-SHA256 under the run's key."""
        return replace(self, signature=self._mac(key))

    def verify_signature(self, key: str) -> bool:
        """Whether somebody who knows the run's key signed this very manifest."""
        return hmac.compare_digest(self.signature, self._mac(key))

    def to_json(self) -> bytes:
        """What is written to the bucket."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Reads a manifest back.

        Raises:
            ConfigError: the bytes are no manifest, or name files that an adapter does not have.
        """
        try:
            fields = json.loads(data)
            files = {
                str(name): File(int(file["size"]), str(file["sha256"])) for name, file in fields.pop("files").items()
            }
            manifest = cls(files=files, **fields)
            if set(files) != set(FILES):
                raise ValueError(f"files are {sorted(files)}, expected {sorted(FILES)}")
            return manifest
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not an adapter's manifest: {error}") from error

    def verify_files(self, directory: Path) -> None:
        """Checks sizes and digests of the files in `directory`.

        Raises:
            ConfigError: naming the first file that differs.
        """
        for name, file in self.files.items():
            try:
                data = (directory / name).read_bytes()
            except OSError as error:
                raise ConfigError(f"{self.wire_name}: {name} cannot be read: {error.strerror}") from error
            if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
                raise ConfigError(
                    f"{self.wire_name}: {name} is not what its manifest says ({len(data)} bytes of {file.size})"
                )

    def _mac(self, key: str) -> str:
        body = replace(self, signature="", published_at=None).to_json()
        return hmac.new(key.encode(), body, hashlib.sha256).hexdigest()


def adapter_prefix(run: str, attempt: int, version: int) -> str:
    """Where a version's files lie in the bucket, without the last '/'."""
    return f"runs/{run}/adapters/{attempt}/v{version}"


def manifest_key(run: str, attempt: int, version: int) -> str:
    """Key of a version's manifest."""
    return f"{adapter_prefix(run, attempt, version)}/manifest.json"


def build(
    directory: Path, name: WireName, base_model: str, max_rank: int | None = None, step: int | None = None
) -> Manifest:
    """Describes the adapter that PEFT saved in `directory`, unsigned.

    `max_rank` is the servers' --max-lora-rank; None does not check it.

    Raises:
        ConfigError: the adapter is incomplete or one that vLLM cannot serve; names the field, its value and the fix.
    """
    raw: dict[str, bytes] = {}
    for file in FILES:
        try:
            raw[file] = (directory / file).read_bytes()
        except OSError as error:
            raise ConfigError(f"No adapter found for {directory}: {file} cannot be read: {error.strerror}") from error
    try:
        config = json.loads(raw[CONFIG_FILE])
        assert isinstance(config, dict)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{CONFIG_FILE} in {directory} is not a JSON object: {error}") from error
    check_config(config, max_rank)
    rank = int(config["r"])
    alpha = float(config.get("lora_alpha") or rank)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Manifest(
        run=name.run,
        attempt=name.attempt,
        version=name.version,
        base_model=base_model,
        rank=rank,
        alpha=alpha,
        strength=abs(scale) * _strength(raw[WEIGHTS_FILE]),
        files={file: File(len(data), hashlib.sha256(data).hexdigest()) for file, data in raw.items()},
        step=step,
    )


def check_config(config: Mapping[str, Any], max_rank: int | None = None) -> None:
    """Checks an adapter's configuration (the fields of `adapter_config.json` or of PEFT's `LoraConfig`).

    Raises:
        ConfigError: naming the field that vLLM cannot serve as an adapter.
    """
    kind = config.get("peft_type")
    if kind is not None and str(getattr(kind, "value", kind)).upper() != "LORA":
        raise ConfigError(f"peft_type = {kind!r}: only LORA adapters can be served by vLLM.")
    for name, fine in _REFUSED.items():
        if config.get(name) not in fine:
            raise ConfigError(
                f"{name} = {config[name]!r}: vLLM cannot serve this as an adapter, and without NCCL there is no other "
                f"way to the replicas. Use {name} = {fine[-1] if fine[-1] is not None else fine[0]!r}."
            )
    targets = config.get("target_modules") or []
    for target in [targets] if isinstance(targets, str) else targets:
        if target.rpartition(".")[2] in _HEADS:
            raise ConfigError(f"target_modules has {target!r}: vLLM cannot serve an adapter there. Leave it out.")
    rank = config.get("r")
    patterns = config.get("rank_pattern") or {}
    largest = max([rank, *patterns.values()]) if isinstance(rank, int) else None
    if not isinstance(largest, int) or isinstance(rank, bool) or largest < 1:
        raise ConfigError(f"r = {rank!r}: the rank is a whole number of at least 1.")
    limit = max_rank if max_rank is not None else RANKS[-1]
    if largest > limit:
        raise ConfigError(
            f"r = {largest}: LoRA rank {largest} is greater than max_lora_rank {limit} of the servers. "
            f"Lower it, or start them with --max-lora-rank {next((r for r in RANKS if r >= largest), RANKS[-1])}."
        )


def _strength(weights: bytes) -> float:
    """Largest ||B|| * ||A|| over the modules of a PEFT safetensors file. Format: https://huggingface.co/docs/safetensors.

    Raises:
        ConfigError: truncated or unreadable, in vLLM's spirit: better now than in the engine.
    """
    try:
        (length,) = struct.unpack("<Q", weights[:8])
        header = json.loads(weights[8 : 8 + length])
        header.pop("__metadata__", None)
        body = memoryview(weights)[8 + length :]
        if max((tensor["data_offsets"][1] for tensor in header.values()), default=0) != len(body):
            raise ValueError("incomplete metadata, file not fully covered")
        norms: dict[str, dict[str, float]] = {}
        for name, tensor in header.items():
            module, _, side = name.partition(".lora_")
            if side[:1] not in ("A", "B"):
                raise ValueError(f"{name} is no tensor of a LoRA adapter")
            start, end = tensor["data_offsets"]
            norms.setdefault(module, {})[side[0]] = _norm(body[start:end], tensor["dtype"])
        if not norms:
            raise ValueError("it contains no tensors")
        if lone := [module for module, sides in norms.items() if len(sides) != 2]:
            raise ValueError(f"{lone[0]} has only one of lora_A and lora_B")
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise ConfigError(f"{WEIGHTS_FILE}: {error}") from error
    strength = max(sides["A"] * sides["B"] for sides in norms.values())
    if not math.isfinite(strength):
        raise ConfigError(f"{WEIGHTS_FILE}: the adapter holds NaN or infinite values; training has diverged.")
    return strength


def _norm(data: memoryview, dtype: str) -> float:
    """Frobenius norm of a tensor's little-endian bytes. With numpy where it is there: 40 times as fast (measured)."""
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data, dtype = memoryview(wide), "F32"
    code = {"F16": "e", "F32": "f", "F64": "d"}.get(dtype)
    if code is None:
        raise ValueError(f"dtype {dtype} is none that PEFT saves")
    try:
        import numpy
    except ImportError:
        return math.sqrt(math.fsum(x * x for (x,) in struct.iter_unpack(f"<{code}", data)))
    return float(numpy.linalg.norm(numpy.frombuffer(data, dtype=f"<{code}").astype("f8")))
