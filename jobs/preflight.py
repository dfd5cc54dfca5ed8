"""What is checked before anything is started: a check that fails says the field, its value, the limit and the fix."""

import ast
import difflib
import logging
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from packaging.requirements import InvalidRequirement, Requirement

from jobs import modules, packages, versions
from jobs import script as scripts
from jobs.errors import ConfigError
from jobs.manifest import RANKS, check_config
from jobs.packages import Packages
from jobs.recipe import DTYPES, Recipe, is_directory
from jobs.reward_server import RewardServer, is_url
from jobs.roster import Role

log = logging.getLogger(__name__)

INSTALL = "Install the environment with ./build.sh, or pip install -r requirements/cpu.txt (gpu.txt on GPUs)."

SET_BY_US = {
    "output_dir": "the run keeps its output in the Job's own directory and in the bucket",
    "vllm_server_base_url": "TRL is pointed at the run's proxy",
    "use_cpu": "it follows from the machine",
    "report_to": "metrics go to the bucket",
}
"""Fields of `AsyncGRPOConfig` that a recipe cannot choose, and why. With a script of the user's own, who may want
metrics elsewhere too, it can choose `report_to`."""

SECRET = ("hub_token", "push_to_hub_token")
"""Fields of transformers' `TrainingArguments` that hold a token."""
NEEDED: dict[Role, tuple[str, ...]] = {"trainer": ("torch", "trl", "peft"), "replica": ("torch", "vllm")}
"""Packages that a role imports."""


def check(recipe: Recipe, local: bool, pythons: Mapping[Role, str] | None = None) -> None:
    """Checks a recipe. With `local`, the trainer and the replicas run on this machine, so what they need of it is
    checked as well: in this environment, or in that of the interpreter that `pythons` names for a role.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    check_model(recipe)
    check_replicas(recipe)
    check_rewards(recipe)
    check_script(recipe)
    check_secrets(recipe)
    check_adapter(recipe)
    check_lengths(recipe)
    check_versions(recipe)
    if local:
        found = {role: _packages((pythons or {}).get(role)) for role in NEEDED}
        check_environment(found)
        check_trainer_fields(recipe, trainer_fields(found["trainer"]))
        check_functions(recipe)
        check_servers(recipe, here=True)


def check_model(recipe: Recipe) -> None:
    """The model may be there: a directory that has one, or what can be a model's name on the Hub."""
    model, dtype = recipe.model.id, recipe.model.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype = {dtype!r}: expected one of {', '.join(DTYPES)}.")
    if not model.strip():
        raise ConfigError(f"model.id = {model!r}: name a model of the Hub (organization/name), or a directory.")
    if model.startswith("tiny:"):
        return
    if is_directory(Path(model)):
        if not Path(model, "config.json").is_file():
            raise ConfigError(
                f"model.id = {model!r}: there is no config.json in this directory. Name the one that holds the model's "
                "files."
            )
        return
    if model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        raise ConfigError(
            f"model.id = {model!r}: no such directory. A path in a recipe's file is relative to the file or to the "
            "current directory, one given by --set to the current directory."
        )
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ConfigError(
            f"model.id = {model!r}: neither a directory nor what a model is called on the Hub, name or "
            "organization/name. Mend the name or the path."
        ) from error


def check_replicas(recipe: Recipe) -> None:
    """Number of replicas and engines."""
    for name, value in (("replica.count", recipe.replica.count), ("replica.engines", recipe.replica.engine_count)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: at least 1 is needed.")
    if (ranks := recipe.replica.vllm.get("data_parallel_size", 1)) > 1:
        raise ConfigError(
            f"replica.vllm.data_parallel_size = {ranks}: TRL then syncs merged weights over NCCL, which does not reach "
            "the replicas. Remove it, and set replica.engines or replica.count instead."
        )


def check_rewards(recipe: Recipe) -> None:
    """As many weights as functions, and servers that answer before TRL takes the rollout process for hung."""
    if recipe.reward is None:
        return
    weights, functions = recipe.reward.weights, recipe.reward.functions
    if not functions:
        raise ConfigError("reward.functions is empty: name at least one as module:function.")
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} numbers for {len(functions)} functions: give one each, or none."
        )
    for server in reward_servers(recipe):
        stale_s = float(recipe.trainer.get("heartbeat_stale_after_s", 300.0))
        if (longest_s := server.longest_s) >= stale_s:
            raise ConfigError(
                f"reward.timeout_s = {server.timeout_s:g}: a group may take {longest_s:g} s with it, and TRL takes the "
                f"rollout process for hung after trainer.heartbeat_stale_after_s = {stale_s:g}. Lower the one, or "
                f"raise the other above {longest_s:g}."
            )


def check_script(recipe: Recipe) -> None:
    """The script trains an adapter, as far as can be seen; tells where its model is not the one that is served."""
    if recipe.script is None:
        return
    field, packages = f"dependencies of {recipe.script.name}", scripts.dependencies(recipe.script.text)
    check_requirements(field, packages)
    versions.check_packages(field, packages)
    versions.check_together(field, packages, "jobs.trainer_packages", recipe.jobs.trainer_packages)
    if recipe.lora is None and recipe.stated.full:
        raise ConfigError(scripts.NO_ADAPTER)
    if recipe.stated.model not in (None, recipe.model.id):
        log.warning(
            "%s trains %r; what is trained and served is the recipe's model.id = %r",
            recipe.script.name,
            recipe.stated.model,
            recipe.model.id,
        )


def check_secrets(recipe: Recipe) -> None:
    """Nothing secret travels in the run's specification, where everybody who may read the bucket could read it."""
    for name in SECRET:
        if recipe.settings.get(name) is not None:
            where = f"trainer.{name}" if name in recipe.trainer else f"{name} in trainer.script"
            raise ConfigError(
                f"{where}: it would lie open in the run's specification. Take it out: the trainer's Job has the token "
                "that you launch with, as HF_TOKEN."
            )


def check_adapter(recipe: Recipe) -> None:
    """The adapter can be served by vLLM, and each replica has slots for all versions that can be asked for at once."""
    vllm, lora = recipe.replica.vllm, recipe.lora
    rank = vllm.get("max_lora_rank", 16)
    if rank not in RANKS:
        raise ConfigError(f"replica.vllm.max_lora_rank = {rank}: vLLM takes one of {', '.join(map(str, RANKS))}.")
    if lora is not None:
        targets = lora.target_modules if isinstance(lora.target_modules, list) else [lora.target_modules]
        if not targets or not all(target.strip() for target in targets):
            raise ConfigError(
                f"lora.target_modules = {lora.target_modules!r}: an adapter of no module learns nothing. Name modules, "
                "such as ['q_proj', 'v_proj'], or say 'all-linear'."
            )
        check_config({"r": lora.r, "target_modules": targets}, rank)
    elif recipe.rank is not None:
        check_config(recipe.stated.adapter, rank)
    staleness = recipe.settings.get("max_staleness", 4)
    slots = vllm.get("max_loras", staleness + 2)
    if slots < staleness + 2:
        raise ConfigError(
            f"replica.vllm.max_loras = {slots}: trainer.max_staleness = {staleness} lets completions ask for "
            f"{staleness + 1} versions while the next one is loaded, so it takes {staleness + 2}. Raise max_loras "
            f"to {staleness + 2}, or lower max_staleness to {max(slots - 2, 0)}."
        )
    if (kept := vllm.get("max_cpu_loras")) is not None and kept < slots:
        raise ConfigError(f"replica.vllm.max_cpu_loras = {kept}: it must be at least max_loras = {slots}.")


def check_lengths(recipe: Recipe) -> None:
    """A completion of full length leaves room for a prompt."""
    length, completion = recipe.replica.vllm.get("max_model_len"), recipe.settings.get("max_completion_length", 2048)
    if length is not None and completion >= length:
        raise ConfigError(
            f"trainer.max_completion_length = {completion}: with replica.vllm.max_model_len = {length} no token "
            "is left for the prompt. Lower the one or raise the other."
        )


def check_versions(recipe: Recipe) -> None:
    """What the recipe says of the Jobs' images names no version of vLLM or TRL that is not supported."""
    jobs = recipe.jobs
    versions.check_image("jobs.image", jobs.image)
    check_requirements("jobs.trainer_packages", jobs.trainer_packages)
    versions.check_packages("jobs.trainer_packages", jobs.trainer_packages)


def check_requirements(field: str, packages: list[str]) -> None:
    """Each package is one that pip may install. Options, URLs and paths, which it takes as well, are its to judge."""
    for index, package in enumerate(packages):
        if package.startswith("-") or "/" in package:
            continue
        try:
            Requirement(package)
        except InvalidRequirement as error:
            raise ConfigError(
                f"{field}[{index}] = {package!r}: pip cannot read this as a package. Write name, or name==version."
            ) from error


def check_environment(found: Mapping[Role, Packages]) -> None:
    """Each role's environment has the packages that it imports, in versions that are known to work."""
    for role, names in NEEDED.items():
        for name in names:
            if name not in found[role].folders:
                raise ConfigError(f"the package {name} is missing where the {role} runs. {INSTALL}")
    versions.check_trl(found["trainer"].versions["trl"], found["trainer"].python)
    versions.check_vllm(found["replica"].versions["vllm"], found["replica"].python)


def _packages(python: str | None) -> Packages:
    return packages.of(python) if python else packages.here()


def check_trainer_fields(recipe: Recipe, known: set[str]) -> None:
    """Each field of `trainer` is one that TRL's `AsyncGRPOConfig` has, and one that a recipe may set."""
    for name in recipe.trainer:
        if name in SET_BY_US and not (recipe.script and name == "report_to"):
            raise ConfigError(f"trainer.{name} cannot be set: {SET_BY_US[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"trainer.{name} is no field of TRL's AsyncGRPOConfig{hint}.")


def trainer_fields(found: Packages) -> set[str]:
    """Names of the fields of `AsyncGRPOConfig`, read from the sources of TRL and transformers: importing them takes
    seconds."""
    sources = (
        ("trl", "experimental/async_grpo/async_grpo_config.py"),
        ("trl", "trainer/base_config.py"),
        ("transformers", "training_args.py"),
    )
    names: set[str] = set()
    for package, file in sources:
        path = Path(found.folders.get(package, ""), file)
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return names


def reward_servers(recipe: Recipe) -> list[RewardServer]:
    """The reward servers of a recipe; raises ConfigError for a URL that cannot be one."""
    if recipe.reward is None:
        return []
    named = enumerate(recipe.reward.functions)
    return [RewardServer(url, f"reward.functions[{i}]", recipe.reward.timeout_s) for i, url in named if is_url(url)]


def check_servers(recipe: Recipe, here: bool) -> list[str]:
    """Somebody answers at each reward server. `here` says that the trainer will run on this machine; another one may
    reach what this one does not, so then it is no error but words to be told. The trainer looks again when it starts.

    Raises:
        ConfigError: nobody does, or the URL means the machine that asks and the trainer's is another.
    """
    warnings = []
    for server in reward_servers(recipe):
        if not here and server.is_loopback:
            raise ConfigError(
                f"reward.functions: {server.url} is the trainer's own machine when a Job asks there. Give a URL that "
                "leads to the server from everywhere."
            )
        try:
            server.check(0.0)
        except ConfigError as error:
            if here:
                raise
            warnings.append(f"seen from here, not from the trainer's Job: {error}")
    return warnings


def check_functions(recipe: Recipe) -> None:
    """Rewards (and a dataset given as a function) can be imported here, as the Jobs will do."""
    from jobs.rewards import resolve

    with modules.installed(recipe.sources):
        for i, name in enumerate(recipe.reward.functions if recipe.reward else []):
            if not is_url(name):
                resolve(name, f"reward.functions[{i}]")
        if recipe.dataset and ":" in recipe.dataset.load:
            resolve(recipe.dataset.load, "dataset.load")
