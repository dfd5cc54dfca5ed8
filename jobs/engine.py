"""One engine as the fleet knows it, and what can be asked of it. Data only; the rules are in `jobs.fleet`."""

from dataclasses import dataclass, field
from enum import StrEnum

BASE = ""
"""Stands for the base model where a wire name is expected: an engine answers a canary on it before anything else."""


class EngineState(StrEnum):
    """Where an engine stands. Only `READY` gets completions."""

    JOINING = "joining"  # known, never answered
    BACKFILLING = "backfilling"  # answers; loads and proves what was live when it came
    READY = "ready"
    SUSPECT = "suspect"  # away, failing, or unable to serve a live version
    DRAINING = "draining"  # to leave once its completions are answered
    GONE = "gone"


@dataclass(frozen=True)
class Facts:
    """What an engine says about itself. `dtype` as in vLLM's /server_info ("torch.float32"); lengths in tokens."""

    model: str
    dtype: str
    max_model_len: int
    max_loras: int
    max_lora_rank: int


@dataclass(frozen=True)
class Action:
    """Something an engine has to do, for one boot of it: a result that comes after the next boot is ignored."""

    engine: str
    wire: str
    boot_id: str


class Load(Action):
    """Send the load of a version."""


class Prove(Action):
    """Send the canary, on a version or on `BASE`."""


class Unload(Action):
    """Send the unload of a version that nothing asks for any more."""


@dataclass
class Holding:
    """What is known of one version (or of `BASE`) on one engine since its boot."""

    held: bool = False
    digest: str | None = None  # of what is held, as the engine says or as it was loaded
    touched: bool = False  # a load was sent, so the engine may hold it whatever it answered
    proved: bool = False
    permanent: bool = False  # it can never serve it in this boot
    attempts: int = 0
    failures: int = 0  # in a row; sets the back-off
    not_before: float = 0.0
    since: float | None = None  # when the engine became obliged to serve it
    words: str | None = None  # the engine's own, of its last failure
    changed_at: float = float("-inf")
    load_s: float | None = None


@dataclass
class Engine:
    """One engine of one replica."""

    name: str
    url: str
    state: EngineState = EngineState.JOINING
    reason: str | None = None
    boot_id: str | None = None
    facts: Facts | None = None
    reachable: bool = False
    rejected: str | None = None  # why this engine can never serve this run, in this boot
    away_since: float | None = None
    away_reason: str | None = None
    leaving: bool = False
    owed: set[str] = field(default_factory=set)  # live versions it must prove before it is ready
    holdings: dict[str, Holding] = field(default_factory=dict)
    busy: Action | None = None
    was_ready: bool = False  # in this boot
    dead: bool = False  # its death is counted and it was not ready since
    deaths: int = 0
    rejoins: int = 0
    blocked_since: float | None = None
    stall_s: float = 0.0

    def holding(self, wire: str) -> Holding:
        """What is known of this version here, for changing it."""
        return self.holdings.setdefault(wire, Holding())

    def forget(self) -> None:
        """Drops everything known of its last boot."""
        self.holdings.clear()
        self.owed.clear()
        self.boot_id = self.facts = self.rejected = self.busy = None
        self.reachable = self.was_ready = False

    @property
    def answers(self) -> bool:
        """Whether actions can be sent to it."""
        return self.reachable and not self.rejected and not self.leaving and self.state is not EngineState.GONE

    @property
    def away(self) -> bool:
        """Whether it belongs to the fleet and cannot be reached."""
        return not self.reachable and not self.leaving and self.state is not EngineState.GONE
