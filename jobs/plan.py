"""The plan of a run: every value that follows from the recipe, the Jobs to be started, and what they cost. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from huggingface_hub import JobHardwareInfo

from jobs import costs
from jobs import script as scripts
from jobs.errors import ConfigError
from jobs.manifest import RANKS
from jobs.recipe import Recipe
from jobs.roster import JobPlan, Role

MAX_STALENESS, MAX_COMPLETION_TOKENS = 4, 2048
"""Defaults of TRL 1.16's AsyncGRPOConfig."""
EXTRA_SLOTS = 2
"""TRL 1.16 demands max_loras >= max_staleness + 2: the versions that may be asked for, and the one being loaded."""
CPU_SLOTS_PER_SLOT = 4
"""An adapter that vLLM evicts from memory is read from disk again, so several times as many are kept there."""


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with every flag of the engines filled in that follows from the rest. What it says itself stays.

    Raises:
        ConfigError: lora.r is larger than any rank that vLLM serves, or only the run could tell the rank.
    """
    said, rank = recipe.replica.vllm, recipe.rank
    if rank is None and "max_lora_rank" not in said:
        raise ConfigError(scripts.NO_ADAPTER if recipe.stated.full else scripts.NO_RANK)
    fitting = [each for each in RANKS if each >= (rank or 0)]
    if not fitting and "max_lora_rank" not in said:
        raise ConfigError(f"lora.r = {rank}: vLLM serves ranks up to {max(RANKS)}. Lower it.")
    slots = said.get("max_loras", staleness(recipe) + EXTRA_SLOTS)
    derived = {
        **({"dtype": recipe.model.dtype} if recipe.model.dtype != "auto" else {}),  # jobs.machine decides that
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": min(fitting, default=None),
        "max_cpu_loras": CPU_SLOTS_PER_SLOT * slots,
        "logprobs_mode": "processed_logprobs",  # what TRL's ratio is computed against
        "generation_config": "vllm",  # or the model's own sampling defaults change what TRL asks for
    }
    return replace(recipe, replica=replace(recipe.replica, vllm={**derived, **said}))


def staleness(recipe: Recipe) -> int:
    """How many syncs a sample may lag behind."""
    return int(recipe.settings.get("max_staleness", MAX_STALENESS))


def completions_per_step(recipe: Recipe, processes: int) -> int:
    """Completions of an optimizer step of a trainer with so many processes, one for each GPU."""
    batch, accumulated = (
        recipe.settings.get(name, default)
        for name, default in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))
    )
    return int(batch * accumulated * processes)


def in_flight(recipe: Recipe, processes: int) -> int:
    """Completions that TRL keeps going at a time, over all replicas (TRL 1.16)."""
    said = int(recipe.settings.get("max_inflight_tasks", -1))
    return said if said >= 0 else max(staleness(recipe), 1) * completions_per_step(recipe, processes)


@dataclass(frozen=True)
class Group:
    """Jobs of one role. Prices in US dollars, None where the Hub lists no such flavor or price."""

    role: Role
    count: int
    flavor: str
    hardware: str | None
    image: str
    command: list[str]
    ports: list[int]
    network_group: str | None
    volumes: list[dict[str, Any]]
    environment: dict[str, str]
    secrets: list[str]
    labels: dict[str, str]
    timeout_s: int
    usd_per_hour: float | None
    usd_to_timeout: float | None


@dataclass(frozen=True)
class Plan:
    """What will be started, what was derived, and what it costs."""

    run: str
    recipe: Recipe
    groups: list[Group]
    derived: dict[str, Any]
    engine_command: list[str]

    @property
    def usd_per_hour(self) -> float | None:
        """All Jobs together."""
        return _sum(group.usd_per_hour for group in self.groups)

    @property
    def usd_to_timeout(self) -> float | None:
        """All Jobs together, each until its time-out; replicas that are started again within it cost no more."""
        return _sum(group.usd_to_timeout for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The plan as --json prints it."""
        return {
            "run": self.run,
            "recipe": self.recipe.to_dict(),
            "jobs": [asdict(group) for group in self.groups],
            "derived": self.derived,
            "engine_command": self.engine_command,
            "usd_per_hour": self.usd_per_hour,
            "usd_to_timeout": self.usd_to_timeout,
        }


def plan(
    run: str,
    recipe: Recipe,
    jobs: Mapping[Role, JobPlan],
    labels: Mapping[Role, Mapping[str, str]],
    secrets: Iterable[str],
    engine_command: list[str],
    hardware: Iterable[JobHardwareInfo],
) -> Plan:
    """Puts the plan together from a resolved recipe and what each role's Jobs are started with.

    `hardware` is the Hub's list; empty if it is not known, so that nothing has a price.

    Raises:
        ConfigError: a flavor that the Hub does not list, with those it does.
    """
    flavors = {flavor.name: flavor for flavor in hardware}
    prices = costs.usd_per_minute(flavors.values())
    counts: dict[Role, int] = {"trainer": 1, "replica": recipe.replica.count}
    groups = []
    for role, count in counts.items():
        job = jobs[role]
        if flavors:
            check_flavor(f"jobs.{role}_flavor", job.flavor, flavors)
        hourly = round(count * prices[job.flavor] * costs.MINUTES_PER_HOUR, 3) if flavors else None
        groups.append(
            Group(
                role=role,
                count=count,
                flavor=job.flavor,
                hardware=_hardware(flavors[job.flavor]) if flavors else None,
                image=job.image,
                command=job.command,
                ports=job.ports,
                network_group=job.network_group,
                volumes=[volume.to_dict() for volume in job.volumes],
                environment=job.environment,
                secrets=sorted(secrets),
                labels=dict(labels[role]),
                timeout_s=job.timeout_s,
                usd_per_hour=hourly,
                usd_to_timeout=round(hourly * job.timeout_s / 3600, 2) if hourly is not None else None,
            )
        )
    trainer = flavors.get(jobs["trainer"].flavor)
    return Plan(run, recipe, groups, derived(recipe, _gpus(trainer) if trainer else None), engine_command)


def check_flavor(field: str, flavor: str, known: Iterable[str]) -> None:
    """Raises ConfigError if the Hub has no such flavor."""
    if flavor not in set(known):
        raise ConfigError(f"{field} = {flavor!r}: the Hub has no such flavor. It has: {', '.join(sorted(known))}.")


def derived(recipe: Recipe, trainer_gpus: int | None) -> dict[str, Any]:
    """Values that follow from a resolved recipe and the trainer's machine, by the name of the setting they belong to.

    A number of GPUs that is not known (None) counts as one.

    Completions a step: per_device_train_batch_size x gradient_accumulation_steps x GPUs (TRL 1.16).
    """
    trainer, vllm = recipe.settings, recipe.replica.vllm
    processes = max(1, trainer_gpus or 1)
    batch = completions_per_step(recipe, processes)
    lag = staleness(recipe)
    length, completion = vllm.get("max_model_len"), trainer.get("max_completion_length", MAX_COMPLETION_TOKENS)
    steps = trainer.get("max_steps", -1)  # -1: num_train_epochs says how long
    said = recipe.stated.config
    overruled = [f"{name} {said[name]} -> {value}" for name, value in recipe.trainer.items() if name in said]
    script = {"script": " ".join([recipe.script.name, *recipe.script.args])} if recipe.script else {}
    return {
        **script,
        **({"overruled": ", ".join(overruled)} if overruled else {}),
        "trainer_processes": processes,
        "completions_per_step": batch,
        "prompts_per_step": batch / trainer.get("num_generations", 8),
        "max_inflight_tasks": in_flight(recipe, processes),
        "max_staleness": lag,
        "max_loras": vllm.get("max_loras"),
        "max_lora_rank": vllm.get("max_lora_rank"),
        "max_cpu_loras": vllm.get("max_cpu_loras"),
        "max_model_len": length if length is not None else "the model's own",
        "longest_prompt_tokens": length - completion if length is not None else "the model's own length - completion",
        "token_budget": trainer.get("token_budget", length if length is not None else "the server's max_model_len"),
        "engines": recipe.replica.count * recipe.replica.engine_count,
        "syncs": -(-steps // trainer.get("weight_sync_steps", 1)) if steps > 0 else None,
        "versions_served_at_once": lag + EXTRA_SLOTS,
        "lease_s": recipe.jobs.lease_s,
    }


def _gpus(flavor: JobHardwareInfo) -> int:
    return int(flavor.accelerator.quantity) if flavor.accelerator else 0


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else round(sum(value or 0.0 for value in known), 2)


def _hardware(flavor: JobHardwareInfo) -> str:
    gpu = f"{flavor.accelerator.quantity} x {flavor.accelerator.model}, " if flavor.accelerator else ""
    return f"{gpu}{flavor.cpu}, {flavor.ram}"
