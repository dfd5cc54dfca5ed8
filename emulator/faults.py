"""Faults: a small language for what goes wrong in an emulated run, so that recovery can be seen and repeated.

    kill replica[1] at step 30; preempt trainer after 60s; kill proxy at step 10; bucket 503 5%; bucket lag 2.5s;
    bucket away 60s at step 20; mount missing 30s; tear publish v7; jobs 500-after-create

`kill` is SIGKILL, `preempt` is SIGTERM, `hang` is SIGSTOP for a while. `tear publish` kills the proxy when a version's
files are in the bucket and its manifest is not. With `jobs 500-after-create` the Hub makes every Job and says that it
failed. Pure: parsing, and which faults are due.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.errors import ConfigError

Action = Literal["kill", "preempt", "hang", "away", "tear"]
KNOWN = (
    "kill replica[N]|trainer|proxy at step N",
    "kill replica[N]|trainer|proxy after Ns",
    "preempt replica[N]|trainer at step N",
    "preempt replica[N]|trainer after Ns",
    "hang replica[N]|proxy Ns at step N",
    "hang replica[N]|proxy Ns after Ns",
    "tear publish vN",
    "jobs 500-after-create",
    "bucket 503 P%",
    "bucket lag Ns",
    "mount lag Ns",
    "mount missing Ns",
    "mount listing Ns",
    "bucket away Ns at step N",
    "bucket away Ns after Ns",
)
"""Every form, as it is shown to a user who wrote another."""

_SECONDS = r"(?P<{}>[0-9]+(?:\.[0-9]+)?)\s*s"
_WHEN = rf"(?:at step (?P<step>[0-9]+)|after {_SECONDS.format('after')})"
_TARGET = r"(?P<target>replica\[[0-9]+\]|trainer|proxy)"
_FORMS = [
    re.compile(rf"(?P<action>kill) {_TARGET} {_WHEN}"),
    re.compile(rf"(?P<action>preempt) (?P<target>replica\[[0-9]+\]|trainer) {_WHEN}"),
    re.compile(rf"(?P<action>hang) (?P<target>replica\[[0-9]+\]|proxy) {_SECONDS.format('for')} {_WHEN}"),
    re.compile(rf"(?P<target>bucket) (?P<action>away) {_SECONDS.format('for')} {_WHEN}"),
]
_TEAR = re.compile(r"tear publish v(?P<version>[0-9]+)")
_JOBS = "jobs 500-after-create"
_RATE = re.compile(r"bucket 503 (?P<percent>[0-9]+(?:\.[0-9]+)?)\s*%")
_LAG = re.compile(rf"(?P<of>bucket lag|mount lag|mount missing|mount listing) {_SECONDS.format('lag')}")


@dataclass(frozen=True)
class Fault:
    """Something that happens once: at an optimizer step, or some seconds after the run's start.

    `index` is a replica's, or the number of the version whose publish is torn.
    """

    action: Action
    target: Literal["replica", "trainer", "proxy", "bucket", "publish"]
    index: int = 0
    step: int | None = None
    after_s: float | None = None
    for_s: float = 0.0

    def due(self, step: int, elapsed_s: float) -> bool:
        """Whether it should have happened by now."""
        if self.step is not None:
            return step >= self.step
        return self.after_s is not None and elapsed_s >= self.after_s


@dataclass(frozen=True)
class Faults:
    """All faults of a run: single events, and how badly bucket and mounts behave throughout (None: as they do anyway).

    `mount_lag_s` is how late mounts are on the mean, `mount_missing_s` how long they take a missing name for missing,
    `mount_listing_s` how old their listings may be. `jobs_500`: the creation of every Job is answered with 500.
    """

    events: Sequence[Fault] = ()
    bucket_503: float = 0.0
    bucket_lag_s: float = 0.0
    mount_lag_s: float | None = None
    mount_missing_s: float | None = None
    mount_listing_s: float | None = None
    jobs_500: bool = False

    @property
    def of_bucket(self) -> bool:
        """Whether any of them is the bucket's server's."""
        return bool(self.bucket_503 or self.bucket_lag_s) or any(
            event.target in ("bucket", "publish") for event in self.events
        )

    def check(self, replicas: int) -> None:
        """Raises ConfigError for a fault of a replica that a run of so many does not have."""
        for event in self.events:
            if event.target == "replica" and event.index >= replicas:
                raise ConfigError(
                    f"--faults '{event.action} replica[{event.index}]': the run has {replicas}, and counts them from 0."
                )


def parse(spec: str) -> Faults:
    """Reads faults separated by ';' or ','.

    Raises:
        ConfigError: for the first one that has no known form, with the nearest and all known ones.
    """
    events, rate, jobs_500 = [], 0.0, False
    lags: dict[str, float] = {}
    for text in (" ".join(part.split()) for part in re.split("[;,]", spec)):
        if not text:
            continue
        if match := _RATE.fullmatch(text):
            rate = float(match["percent"]) / 100
        elif match := _LAG.fullmatch(text):
            lags[match["of"]] = float(match["lag"])
        elif match := _TEAR.fullmatch(text):
            events.append(Fault("tear", "publish", int(match["version"]), step=0))
        elif text == _JOBS:
            jobs_500 = True
        else:
            events.append(_event(text))
    if not 0 <= rate < 1:
        raise ConfigError(f"--faults 'bucket 503 {rate:.0%}': at most 99 % of the answers can be errors.")
    lag, missing, listing = (lags.get(f"mount {of}") for of in ("lag", "missing", "listing"))
    return Faults(tuple(events), rate, lags.get("bucket lag", 0.0), lag, missing, listing, jobs_500)


def _event(text: str) -> Fault:
    for form in _FORMS:
        if match := form.fullmatch(text):
            found = match.groupdict()
            target, _, index = found["target"].partition("[")
            return Fault(
                action=found["action"],  # type: ignore[arg-type]
                target=target,  # type: ignore[arg-type]
                index=int(index.rstrip("]") or 0),
                step=int(found["step"]) if found["step"] else None,
                after_s=float(found["after"]) if found["after"] else None,
                for_s=float(found.get("for") or 0),
            )
    near = difflib.get_close_matches(text, KNOWN, n=1, cutoff=0.0)[0]
    raise ConfigError(f"--faults {text!r} is unknown; nearest: {near!r}. Known: {'; '.join(KNOWN)}.")
