import pickle
import random
from itertools import islice

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.prompts import Prompts, Remaining, remaining


def train(prompts: Prompts, *batches: list[int]) -> Prompts:
    """Each batch is taken, put together and trained on."""
    for batch in batches:
        for group in batch:
            prompts.taken(group)
        prompts.batched(batch)
        prompts.trained(1)
    return prompts


def test_a_batch_that_is_ready_was_not_trained_on() -> None:
    prompts = train(Prompts(), [0, 0], [1, 1])
    for group in (2, 2):
        prompts.taken(group)
    prompts.batched([2, 2])
    assert prompts.state() == {"prompt_index": 2, "prompts_done": []}


def test_what_overtook_another_prompt_is_done_and_the_other_is_not() -> None:
    prompts = train(Prompts(), [0, 0], [3, 3], [2, 2])
    assert prompts.state() == {"prompt_index": 1, "prompts_done": [2, 3]} and prompts.count == 3
    assert list(islice(remaining(*Prompts.of(prompts.state()).begin), 3)) == [1, 4, 5]
    again = train(Prompts.of(prompts.state()), [1, 1], [0, 0])  # its groups: 1, 4, 5, ...
    assert again.state() == {"prompt_index": 5, "prompts_done": []}


def test_what_was_dropped_as_too_old_is_done_once_others_are() -> None:
    prompts = Prompts()
    for group in (0, 0, 1, 1):
        prompts.taken(group)
    prompts.batched([1, 1])
    assert prompts.count == 0
    prompts.trained(1)
    assert prompts.state() == {"prompt_index": 2, "prompts_done": []}


def test_a_prompt_of_two_batches_is_done_with_the_first() -> None:
    prompts = train(Prompts(), [0, 0, 1], [1, 2, 2])
    assert prompts.count == 3


def test_steps_of_several_batches_count_when_they_are_made() -> None:
    prompts = Prompts()
    for group in range(3):
        prompts.taken(group)
        prompts.batched([group])
    prompts.trained(2)
    assert prompts.count == 2


def test_a_checkpoint_of_trl_itself_is_read() -> None:
    assert Prompts.of({"prompt_index": 7, "model_version": 3}).state() == {"prompt_index": 7, "prompts_done": []}
    assert Prompts.of({}).count == 0


@given(st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_interruptions_leave_none_out_and_repeat_none(seed: int, ahead: int, lengths: list[int]) -> None:
    """Each attempt trains on prompts that finish in any order, some of which are dropped, and is then cut off."""
    chance, state, done = random.Random(seed), {}, list[int]()
    for length in lengths:
        prompts = Prompts.of(state)
        numbers = remaining(*prompts.begin)
        known, waiting = dict[int, int](), list[int]()
        for _ in range(length):
            while len(waiting) < ahead:
                waiting.append(len(known))
                known[len(known)] = next(numbers)
            group = waiting.pop(chance.randrange(len(waiting)))
            prompts.taken(group)
            if chance.random() < 0.8:
                prompts.batched([group])
                prompts.trained(1)
                done.append(known[group])
        state = prompts.state()
    assert len(done) == len(set(done))
    first, over = state["prompt_index"], state["prompts_done"]
    assert set(done) <= {*range(first), *over}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_rows_that_are_left_come_pass_after_pass(streamed: bool) -> None:
    rows = datasets.Dataset.from_list([{"n": n} for n in range(5)])
    left = pickle.loads(pickle.dumps(Remaining(rows.to_iterable_dataset() if streamed else rows, 7, [8, 11])))
    assert [row["n"] for row in islice(left, 6)] == [2, 4, 0, 2, 3, 4]
