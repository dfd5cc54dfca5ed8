"""The run's specification: one object in the bucket, written once by the launcher and read by every role."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jobs.bucket import Bucket
from jobs.errors import ConfigError, NotFound
from jobs.recipe import Recipe

Engine = Literal["vllm", "sim"]
Transport = Literal["s3", "mount"]
"""How replicas read adapters: by S3, or from the bucket mounted as a directory. They are written by S3 in both."""

VLLM_SERVER = "vllm.entrypoints.openai.api_server"
"""Module that serves one engine; what `vllm serve` runs, without needing a distribution named `vllm`."""


@dataclass(frozen=True)
class ModelRef:
    """Where the base model comes from: `hub` (an id), `bucket` (a prefix in the bucket, fetched to each machine) or
    `path` (a directory that is there on every machine). `served` is its name on the wire."""

    kind: Literal["hub", "bucket", "path"]
    source: str
    served: str


@dataclass(frozen=True)
class RunSpec:
    """What every role of a run needs to know; holds no secret."""

    run: str
    recipe: Recipe
    model: ModelRef
    engine: Engine = "vllm"
    engine_module: str = VLLM_SERVER
    transport: Transport = "s3"
    seed: int = 0
    created_at: float = 0.0
    archive_sha256: str = ""

    def to_json(self) -> bytes:
        """What is written to the bucket."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "RunSpec":
        """Reads a specification back.

        Raises:
            ConfigError: it is none, or one of another version of this program.
        """
        try:
            values: dict[str, Any] = json.loads(data)
            recipe = Recipe.from_dict(values.pop("recipe"), "spec.json")
            return cls(recipe=recipe, model=ModelRef(**values.pop("model")), **values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"spec.json cannot be read by this version of asyncgrpo: {error}") from error

    @classmethod
    def read(cls, bucket: Bucket, run: str, within_s: float = 0.0) -> "RunSpec":
        """The specification of `run`. A role of it, which was started after that was written, waits for it.

        Raises:
            ConfigError: there is no such run in the bucket.
        """
        try:
            return cls.from_json(bucket.get_shown(spec_key(run), within_s))
        except NotFound as error:
            raise ConfigError(f"run {run!r} is not in the bucket {bucket.settings.url}: no {error.key}.") from error


def final_prefix(run: str) -> str:
    """Where the trained adapter's files lie, without the last '/'."""
    return f"runs/{run}/final"


def spec_key(run: str) -> str:
    """Key of the run's specification."""
    return f"runs/{run}/spec.json"
