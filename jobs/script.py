"""A TRL script of the user's own, as data: read, checked, and asked what it says in plain literals. Runs nothing."""

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.errors import ConfigError

CONFIG, ADAPTER, TRAINER = "AsyncGRPOConfig", "LoraConfig", "AsyncGRPOTrainer"
"""Classes of TRL and PEFT that a script calls under their own names."""
DEFAULT_RANK = 8
"""`LoraConfig.r` in PEFT."""
ADAPTER_POSITION = 7
"""Where `peft_config` stands among the arguments of AsyncGRPOTrainer (TRL 1.14 to 1.16)."""

NO_ADAPTER = (
    "trainer.script trains without an adapter: AsyncGRPOTrainer gets no peft_config, and the recipe has no [lora]. "
    "Full fine-tuning does not reach the replicas, for only adapters travel: add [lora] to the recipe, or a LoraConfig "
    "to the script."
)
NO_RANK = (
    "replica.vllm.max_lora_rank is missing: trainer.script brings an adapter, whose rank cannot be told before it "
    "runs. Say the rank there, or add [lora] to the recipe to have the adapter made from it."
)

_METADATA = re.compile(r"^# /// script\s*$\n((?:^#(?: .*)?$\n)+?)^# ///\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """`trainer.script`, as it travels in the recipe to the trainer's machine: file name, text and arguments."""

    name: str
    text: str
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stated:
    """What can be read off a script without running it; what is computed, or said twice, is not known.

    `config` are fields of AsyncGRPOConfig, `adapter` fields of LoraConfig, `model` is that of AsyncGRPOTrainer. `full`
    says that AsyncGRPOTrainer is given no adapter, by no argument.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    full: bool = False

    @property
    def rank(self) -> int | None:
        """The adapter's rank."""
        rank = self.adapter.get("r")
        return rank if isinstance(rank, int) else None


def take(trainer: dict[str, Any]) -> Script | None:
    """Takes `script` and `script_args` out of a recipe's section `trainer` and reads the file.

    Raises:
        ConfigError: no such file, no Python, or arguments that are no list of texts.
    """
    path, args = trainer.pop("script", None), trainer.pop("script_args", [])
    if path is None:
        if args:
            raise ConfigError(f"trainer.script_args = {args!r}: there is no trainer.script to give them to.")
        return None
    if not isinstance(path, str):
        raise ConfigError(f"trainer.script = {path!r}: expected the path of a Python file.")
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise ConfigError(f"trainer.script_args = {args!r}: expected a list of texts, such as ['--steps', '100'].")
    try:
        text = Path(path).read_text(encoding="utf-8")
        ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"trainer.script = {path!r}: no Python in line {error.lineno}: {error.msg}.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"trainer.script = {path!r} cannot be read: {error}. The path is relative to the recipe's file, or to the "
            "current directory if given by --set."
        ) from error
    return Script(Path(path).name, text, args)


def dependencies(text: str) -> list[str]:
    """The packages that a script asks for in its inline metadata (PEP 723), as pip takes them.

    Raises:
        ConfigError: the metadata is no TOML.
    """
    found = _METADATA.search(text)
    if found is None:
        return []
    lines = "".join(f"{line.removeprefix('#').removeprefix(' ')}\n" for line in found[1].splitlines())
    try:
        return [str(each) for each in tomllib.loads(lines).get("dependencies", [])]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"trainer.script: its metadata (# /// script) is no TOML: {error}") from error


def stated(text: str) -> Stated:
    """What a script says in literals; see `Stated`."""
    calls: dict[str, list[ast.Call]] = {CONFIG: [], ADAPTER: [], TRAINER: []}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (name := _name(node.func)) in calls:
            calls[name].append(node)
    config, adapter, trainer = (calls[name][0] if len(calls[name]) == 1 else None for name in calls)
    fields = _literals(adapter) if adapter is not None else {}
    if adapter is not None and _whole(adapter) and not adapter.args and "r" not in _keywords(adapter):
        fields["r"] = DEFAULT_RANK
    model = _literals(trainer).get("model") if trainer is not None else None
    full = (
        trainer is not None
        and _whole(trainer)
        and len(trainer.args) <= ADAPTER_POSITION
        and _literals(trainer).get("peft_config", "not said" if "peft_config" in _keywords(trainer) else None) is None
    )
    return Stated(
        _literals(config) if config is not None else {},
        fields,
        model if isinstance(model, str) else None,
        full,
    )


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _whole(call: ast.Call) -> bool:
    """Whether all arguments are to be seen: neither *args nor **kwargs."""
    return not any(isinstance(arg, ast.Starred) for arg in call.args) and all(each.arg for each in call.keywords)


def _keywords(call: ast.Call) -> set[str | None]:
    return {each.arg for each in call.keywords}


def _literals(call: ast.Call) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in call.keywords:
        try:
            if each.arg is not None:
                found[each.arg] = ast.literal_eval(each.value)
        except ValueError:
            continue
    return found
