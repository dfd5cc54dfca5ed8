"""The data set of the recipe `sanity`: mathematical problems that the model solves sometimes, neither always nor never.

sail/Sanity-Test-R1D-1.5B: columns `prompt` (messages) and `reward_model` (with `ground_truth`), among others.
"""

from typing import Any

DATASET = "sail/Sanity-Test-R1D-1.5B"


def problems(split: str = "train") -> Any:
    """The problems as `jobs.rewards:math` takes them: columns `prompt` and `answer`."""
    import datasets

    return with_answers(datasets.load_dataset(DATASET, split=split))


def with_answers(found: Any) -> Any:
    """Keeps `prompt` and puts the ground truth into `answer`."""
    answers = [str(each["ground_truth"]) for each in found["reward_model"]]
    return found.select_columns(["prompt"]).add_column("answer", answers)
