"""Recipes: everything a run is made of, as data. A recipe is a TOML file; the built-in ones lie in jobs/recipes/."""

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from jobs import limits, modules
from jobs import script as scripts
from jobs.errors import ConfigError
from jobs.script import Script, Stated

Ack = Literal["published", "first", "all"]
Parallel = Literal["fsdp2", "ddp"]
Network = Literal["exposed", "group"]
DTYPES = ("auto", "bfloat16", "float16", "float32")
"""What TRL's trainer takes."""


@dataclass(frozen=True)
class Model:
    """`id` is `tiny:<name>` (a builder in jobs/tiny.py), a model id on the Hub, or a local directory: beside the
    recipe's file if there is one of that name, else in the current directory.

    `dtype` is that of the trainer and the engines, one of `DTYPES`; `auto` is bfloat16 on GPUs, float32 on a CPU."""

    id: str
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class DatasetSource:
    """`load` is `module:function` returning a `datasets.Dataset` with a `prompt` column, or a list of its rows; or a
    dataset id on the Hub."""

    load: str
    split: str = "train"


@dataclass(frozen=True)
class Reward:
    """`functions` are `module:function` in TRL's reward signature, plain or async, or the http(s) URL of a reward
    server (jobs.reward_server); `timeout_s` is what one request to a server may take. `weights` has one number for each
    function, or is empty."""

    functions: list[str]
    weights: list[float] = field(default_factory=list)
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Lora:
    """The adapter, as in PEFT's `LoraConfig`."""

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    use_rslora: bool = False

    def peft(self) -> Any:
        """PEFT's `LoraConfig` of it; imports PEFT."""
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
            use_rslora=self.use_rslora,
        )


@dataclass(frozen=True)
class Replica:
    """The generation side: `count` replica Jobs with `engines` servers each, `auto` for as many as the flavor's GPUs
    and cores can use (jobs.machine); `vllm` are flags of `vllm serve` (underscores). `request_seeds` has completions
    drawn with the seeds that TRL sends, random ones, at the price of a fifth of the tokens (jobs.tokens)."""

    count: int = 2
    engines: int | Literal["auto"] = 1
    vllm: dict[str, Any] = field(default_factory=dict)
    request_seeds: bool = False

    @property
    def engine_count(self) -> int:
        """Engines of each Job, once that is decided: `auto` counts as the one that there is at least."""
        return 1 if self.engines == "auto" else self.engines


@dataclass(frozen=True)
class Proxy:
    """The proxy. `ack` says when a published version is acknowledged to the trainer: durably in the bucket
    (`published`), on the first replica, or on all of them."""

    ack: Ack = "published"
    publish_deadline_s: float = 300.0
    load_deadline_s: float = 300.0
    park_timeout_s: float = 1800.0
    max_parked: int = 65536
    max_body_bytes: int = 256 << 20
    max_batch: int = 4096
    max_redispatches: int = 8


@dataclass(frozen=True)
class JobSettings:
    """How the Jobs are started on Hugging Face Jobs. The Hub may keep a Job in SCHEDULING for hours:
    `schedule_deadline_s` bounds that. `start_deadline_s` is what a running trainer gets until its first step,
    `ready_deadline_s` how long a running replica may not be ready before another takes its place, `lease_s` how long a
    replica outlives the last sign of its run, and how long a trainer may tell nothing. `trainer_packages` are installed
    by pip in the trainer's Job before it starts, with the packages that a script asks for in its inline metadata: the
    image has vLLM, not TRL. Empty for an image that has it all. `trainer_image` is that of the trainer, if it is
    another one than the replicas' `image`. `parallel` is what a trainer does with several GPUs: `fsdp2` shards the
    model among them, `ddp` has all of it on each, which spares the gathering of one that fits. `network` is how the
    trainer reaches replicas: at `exposed` ports, through the Hub's gateway, or directly in a network `group`."""

    replica_flavor: str = "h200"
    trainer_flavor: str = "h200"
    image: str = "vllm/vllm-openai:v0.31.0"
    trainer_image: str = ""
    parallel: Parallel = "fsdp2"
    trainer_packages: list[str] = field(
        default_factory=lambda: [
            "trl==1.16.0",
            "peft==0.21.2",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "kernels==0.13.0",
            "math-verify==0.9.0",
        ]
    )
    timeout_s: int = 4 * 3600
    schedule_deadline_s: int = 3600
    start_deadline_s: int = 1800
    ready_deadline_s: int = 900
    lease_s: int = 600
    network: Network = "exposed"

    @property
    def image_of_trainer(self) -> str:
        """The image that the trainer's Job is started from."""
        return self.trainer_image or self.image


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. `trainer` holds fields of TRL's `AsyncGRPOConfig` under their own names.

    A recipe names a data set and rewards, or a TRL script of the user's own (`trainer.script`, a path, and
    `trainer.script_args`), which brings them. Where the recipe and its script both say something, the recipe holds:
    `model`, each field of `trainer`, and `lora` if there is that section. The script's own values hold otherwise. TRL's
    server, output directory and device are the run's in any case. `script` is the file as it was read; TOML has
    `trainer.script` instead. So are `sources`, by module: files beside the recipe, or in the current directory, that
    rewards and data set name as `module:function`."""

    name: str
    model: Model
    dataset: DatasetSource | None = None
    reward: Reward | None = None
    description: str = ""
    lora: Lora | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    script: Script | None = None
    sources: dict[str, str] = field(default_factory=dict)
    replica: Replica = field(default_factory=Replica)
    proxy: Proxy = field(default_factory=Proxy)
    jobs: JobSettings = field(default_factory=JobSettings)

    @property
    def stated(self) -> Stated:
        """What the script says in plain literals; nothing without one."""
        return scripts.stated(self.script.text) if self.script else Stated()

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `AsyncGRPOConfig` as far as they are known before training: the recipe's, else the script's."""
        return {**self.stated.config, **self.trainer}

    @property
    def rank(self) -> int | None:
        """The adapter's rank; None if only the script can tell, by being run."""
        return self.lora.r if self.lora else self.stated.rank

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "recipe") -> "Recipe":
        """A recipe from parsed TOML or JSON; `source` names it in errors.

        Raises:
            ConfigError: naming an unknown field (and the nearest known one), a missing one, or a value of another type.
        """
        recipe = _read(cls, values, source, "")
        for name in ("dataset", "reward"):
            said = getattr(recipe, name) is not None
            if recipe.script is None and not said:
                raise ConfigError(f"{source}: {name} is missing (or name a trainer.script, which brings its own).")
            if recipe.script is not None and said:
                raise ConfigError(
                    f"{source}: {name}: trainer.script brings its own. Remove the section, or the script."
                )
        return recipe if recipe.script or recipe.lora else dataclasses.replace(recipe, lora=Lora())


def built_in() -> list[str]:
    """Names of the recipes that come with the program."""
    files = resources.files("jobs").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def text(recipe: str) -> str:
    """The TOML of a recipe, built-in by name or a file by path.

    Raises:
        ConfigError: no such recipe (with the known names), or a file that cannot be read.
    """
    path = Path(recipe)
    if recipe in built_in():
        return resources.files("jobs").joinpath("recipes", f"{recipe}.toml").read_text()
    if path.suffix != ".toml" and not path.is_file():
        near, known = _near(recipe, built_in()), ", ".join(built_in())
        raise ConfigError(f"recipe {recipe!r} is unknown{near}. Known: {known}; or give the path of a TOML file.")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {recipe!r} cannot be read: {error}") from error


def load(recipe: str, config: str | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a recipe, lets the fields of the TOML file `config` replace its own, then applies `section.field=value` in
    order.

    Values of overrides are TOML (`true`, `3e-3`, `[1, 2]`, `"text"`); what does not parse as such is text.

    Raises:
        ConfigError: no such recipe, not TOML (with the line), a field that cannot be (with the nearest name), or a
            number out of its range.
    """
    values = _file(recipe)
    if config is not None:
        _merge(values, _file(config))
    for override in overrides:
        _apply(values, override)
    _model_path(values, os.path.expanduser)
    values.setdefault("name", Path(recipe).stem)
    if isinstance(trainer := values.get("trainer"), dict) and (script := scripts.take(trainer)):
        values["script"] = asdict(script)
    values["sources"] = modules.take(values, [*(Path(each).parent for each in (config, recipe) if each), Path()])
    return limits.check(Recipe.from_dict(values, config or recipe))


def override(recipe: Recipe, *overrides: str) -> Recipe:
    """The recipe with `section.field=value` applied."""
    values = recipe.to_dict()
    for each in overrides:
        _apply(values, each)
    return limits.check(Recipe.from_dict(values, f"recipe {recipe.name}"))


def _file(source: str) -> dict[str, Any]:
    """The fields of a built-in recipe or a TOML file. The path of a script in it is relative to the file, and so is
    that of a model which lies there."""
    try:
        values = tomllib.loads(text(source))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from error
    for name, meant in (("script", "trainer.script"), ("sources", "reward.functions")):
        if name in values:
            raise ConfigError(f"{source}: unknown field {name} (did you mean {meant}?).")
    if isinstance(trainer := values.get("trainer"), dict) and isinstance(script := trainer.get("script"), str):
        trainer["script"] = str(Path(source).parent / script)
    if source not in built_in():
        _model_path(values, lambda given: _beside(Path(source).parent, given))
    return values


def _model_path(values: dict[str, Any], found: Callable[[str], str]) -> None:
    if isinstance(model := values.get("model"), dict) and isinstance(given := model.get("id"), str):
        model["id"] = found(given)


def _beside(folder: Path, given: str) -> str:
    """The directory `given` in `folder`, as a path that holds from everywhere; `given` itself if there is none."""
    return str((folder / given).resolve()) if given and is_directory(folder / given) else given


def is_directory(path: Path) -> bool:
    """Whether it is one; a name that no file could have, as it is too long, is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _apply(values: dict[str, Any], override: str) -> None:
    where, equals, text = override.partition("=")
    keys = where.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: expected section.field=value, such as trainer.max_steps=50.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override!r}: {key} is a value, not a section.")
    values[keys[-1]] = value


T = TypeVar("T")


def _read(cls: type[T], values: Any, source: str, where: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {where.rstrip('.')} = {values!r}: expected a section with fields.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(
                f"{source}: unknown field {where}{name}{_near(name, fields)}. Known here: {', '.join(fields)}."
            )
        read[name] = _value(hints[name], value, source, f"{where}{name}")
    for name, known in fields.items():
        missing = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if missing and name not in read:
            raise ConfigError(f"{source}: {where}{name} is missing.")
    return cls(**read)


def _value(hint: Any, value: Any, source: str, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read(typing.cast(type, hint), value, source, f"{where}.")
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{source}: {where} = {value!r}: expected one of {', '.join(map(repr, args))}.")
        return value
    if origin in (UnionType, typing.Union):
        errors = []
        for arg in args:
            try:
                return _value(arg, value, source, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f"{source}: {where} = {value!r}: expected a list.")
        return [_value(args[0], item, source, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {where} = {value!r}: expected a section with fields.")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{source}: {where} = {json.dumps(value, default=str)}: expected {names.get(hint, hint)}.")
    return value


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
