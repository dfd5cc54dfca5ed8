"""The model card of a run's final adapter: `README.md` with what the Hub reads, and with how it came about."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from jobs.manifest import CONFIG_FILE, RANKS
from jobs.packages import NAMES, installed
from jobs.preflight import SET_BY_US
from jobs.recipe import Recipe
from jobs.reward_server import is_url
from jobs.spec import RunSpec

CARD_FILE = "README.md"
TAGS = ["asyncgrpo", "grpo", "lora", "trl"]


def write(directory: Path, spec: RunSpec, summary: Mapping[str, Any]) -> None:
    """Puts the card into the directory of an adapter in PEFT's format, over one that is there; and in its configuration
    the base model's name, as the recipe has it, over a path of this machine.

    `summary` is the run's, as in summary.json.
    """
    file = directory / CONFIG_FILE
    adapter: dict[str, Any] = json.loads(file.read_text())
    if not spec.recipe.model.id.startswith("tiny:"):
        file.write_text(json.dumps({**adapter, "base_model_name_or_path": spec.recipe.model.id}, indent=2) + "\n")
    versions = {name: version for name in NAMES if (version := installed(name))}
    card(spec, adapter, summary, {**versions, "python": platform.python_version()}).save(directory / CARD_FILE)


def card(
    spec: RunSpec, adapter: Mapping[str, Any], summary: Mapping[str, Any], versions: Mapping[str, str]
) -> ModelCard:
    """The card of an adapter, from its PEFT configuration. It has no license: that is for whoever publishes it."""
    base = spec.recipe.model.id if spec.model.kind == "hub" else None
    data = ModelCardData(
        base_model=base,
        datasets=_datasets(spec.recipe),
        library_name="peft",
        pipeline_tag="text-generation",
        tags=[*TAGS, *([f"base_model:adapter:{base}"] if base else [])],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(spec, adapter, summary, versions)}")


def _text(spec: RunSpec, adapter: Mapping[str, Any], summary: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    recipe = spec.recipe
    base, rank = recipe.model.id, int(adapter["r"])
    modules = adapter["target_modules"]
    made = {
        "base model": f"[{base}](https://huggingface.co/{base})" if spec.model.kind == "hub" else f"`{base}`",
        "script": f"`{recipe.script.name}`" if recipe.script else None,
        "data set": f"`{recipe.dataset.load}`, split `{recipe.dataset.split}`" if recipe.dataset else None,
        "reward": _rewards(recipe),
        "optimizer steps": summary.get("steps"),
        "reward, first tenth of the steps": summary.get("reward_first"),
        "reward, last tenth": summary.get("reward_last"),
        "LoRA": f"r {rank}, alpha {adapter['lora_alpha']:g}, dropout {adapter['lora_dropout']:g}"
        + (", rank-stabilized" if adapter.get("use_rslora") else ""),
        "adapted modules": modules if isinstance(modules, str) else ", ".join(sorted(_last_parts(modules))),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "run": f"`{spec.run}`, recipe `{recipe.name}`",
    }
    settings = {f"`{name}`": value for name, value in sorted(recipe.settings.items()) if name not in SET_BY_US}
    served = min((each for each in RANKS if each >= rank), default=rank)
    return f"""# {spec.run}

A LoRA adapter that was trained by reinforcement learning with TRL's `AsyncGRPOTrainer`.

{_table(made)}
## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {base!r}
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "path/of/this/directory")
tokenizer = AutoTokenizer.from_pretrained(base)
```

```
vllm serve {base} --enable-lora --max-lora-rank {served} --lora-modules {spec.run}=path/of/this/directory
```

No license is set: add `license:` to the metadata above before you publish this, as the base model's allows.

## Settings of the trainer

{_table(settings)}"""


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _last_parts(modules: list[str]) -> set[str]:
    """Module names without the layers they are in: PEFT writes out each of `all-linear`."""
    return {name.rpartition(".")[2] for name in modules}


def _rewards(recipe: Recipe) -> str | None:
    """The functions with their weights; of a server's URL what is no secret for sure."""
    if recipe.reward is None:
        return None
    functions = recipe.reward.functions
    weights = recipe.reward.weights or [1.0] * len(functions)
    shown = [f"{(p := urlsplit(each)).scheme}://{p.netloc}{p.path}" if is_url(each) else each for each in functions]
    times = [f"{weight:g} x " if len(functions) > 1 else "" for weight in weights]
    return " + ".join(f"{by}`{name}`" for by, name in zip(times, shown, strict=True))


def _datasets(recipe: Recipe) -> list[str] | None:
    """The data set's id, if it is one on the Hub."""
    load = recipe.dataset.load if recipe.dataset else ""
    try:
        validate_repo_id(load)
    except HFValidationError:
        return None
    return [load] if load and not Path(load).exists() else None
