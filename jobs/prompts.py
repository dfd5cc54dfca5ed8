"""Which prompts a trainer is done with, so that one that goes on after it leaves none out and repeats none.

TRL's own account, `prompt_index` in a checkpoint, is one number. It counts a prompt as soon as its rollouts are put
into a batch, though accelerate makes batches one ahead of training; and it stays for good where rollouts of a prompt
were dropped as too old. A trainer that resumed left out the batch that was ready, and repeated all since such a drop.

A prompt's number counts all that the run takes from its dataset, pass after pass. TRL numbers the groups of one attempt
from 0 instead: the group `g` is the `g`-th prompt that was not done when the attempt began.
"""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

FIRST, DONE = "prompt_index", "prompts_done"
"""Fields of a checkpoint's rollout_state.json. The first one is TRL's: all prompts before it are done. `prompts_done`
are those after it that are done as well, for others overtook it."""


class Prompts:
    """The account of one attempt. Pure. A prompt is done when a step was made with one of its rollouts, or when those
    were dropped as too old; whatever else there is of it was in flight."""

    def __init__(self, first: int = 0, done: Collection[int] = ()) -> None:
        self.first = first
        self.done = set(done)
        self._begin = (first, frozenset(done))
        self._numbers = remaining(*self._begin)
        self._of_group: list[int] = []
        self._taken: deque[int] = deque()
        self._batches: deque[Counter[int]] = deque()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Prompts":
        """The account that goes on from a checkpoint's rollout_state.json; TRL's own have no `prompts_done`."""
        return cls(int(state.get(FIRST, 0)), [int(number) for number in state.get(DONE, [])])

    @property
    def begin(self) -> tuple[int, frozenset[int]]:
        """`first` and `done` as they were when the attempt began."""
        return self._begin

    @property
    def count(self) -> int:
        """How many prompts are done."""
        return self.first + len(self.done)

    def state(self) -> dict[str, Any]:
        """What a checkpoint says."""
        return {FIRST: self.first, DONE: sorted(self.done)}

    def taken(self, group: int) -> None:
        """A rollout of the group was taken out of the queue: it will be put into a batch, or dropped."""
        self._taken.append(group)

    def batched(self, groups: Iterable[int]) -> None:
        """A micro-batch was made of rollouts of these groups, one entry for each. They are made in order of `taken`."""
        self._batches.append(Counter(groups))

    def trained(self, batches: int) -> None:
        """A step was made with the oldest micro-batches. All that was taken before their last rollout is done."""
        for _ in range(batches):
            missing = self._batches.popleft()
            while missing.total() and self._taken:
                group = self._taken.popleft()
                if missing[group]:
                    missing[group] -= 1
                self._settle(group)

    def _settle(self, group: int) -> None:
        while len(self._of_group) <= group:
            self._of_group.append(next(self._numbers))
        if (number := self._of_group[group]) >= self.first:
            self.done.add(number)
        while self.first in self.done:
            self.done.remove(self.first)
            self.first += 1


def remaining(first: int, done: Collection[int]) -> Iterator[int]:
    """The numbers of the prompts that are not done, without an end."""
    return (number for number in itertools.count(first) if number not in done)


class Remaining:
    """The rows of a dataset, pass after pass, without those of prompts that are done. Can be pickled."""

    def __init__(self, dataset: Any, first: int, done: Collection[int]) -> None:
        self._dataset, self._first, self._done = dataset, first, frozenset(done)

    def __iter__(self) -> Iterator[Any]:
        number, rows = 0, self._dataset
        if hasattr(self._dataset, "__len__"):  # a streamed one is read from its beginning
            number, rows = self._first, self._dataset.select(range(self._first % len(rows), len(rows)))
        while True:
            for row in rows:
                if number >= self._first and number not in self._done:
                    yield row
                number += 1
            rows = self._dataset
