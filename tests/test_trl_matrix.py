import sys
from pathlib import Path
from typing import Any

import pytest
import trl_matrix
from trl_matrix import Outcome

from jobs.packages import installed

GOOD = {
    **trl_matrix.EXPECTED,
    "reward_first": 0.0144,
    "reward_last": 0.698,
    "ratio_min": 0.967,
    "ratio_max": 1.041,
    "rollouts": 2280,
}
"""A run of TRL 1.16.0 as it was."""


def outcome(status: int = 0, trained_with: tuple[str, ...] = ("1.16.0", "1.16.0"), **changed: Any) -> Outcome:
    return Outcome("1.16.0", status, {**GOOD, **changed}, trained_with, Path("runs/x"))


def test_a_run_that_is_as_it_should_be() -> None:
    assert trl_matrix.wrong(outcome()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"status": 3}, "exit status 3"),
        ({"trained_with": ()}, "trained with an unknown TRL"),
        ({"trained_with": ("1.16.0", "1.15.0")}, "trained with 1.16.0, 1.15.0"),
        ({"steps": 59}, "steps 59 instead of 60"),
        ({"attempt": 1}, "attempt 1 instead of 2"),
        ({"rollouts_lost": 1}, "rollouts_lost 1 instead of 0"),
        ({"orphans": 2}, "orphans 2 instead of 0"),
        ({"reward_last": 0.3}, "the reward does not climb"),
        ({"reward_last": float("nan")}, "the reward does not climb"),
        ({"ratio_min": 0.79}, "ratio outside 0.8 to 1.2"),
        ({"ratio_max": 1.21}, "ratio outside 0.8 to 1.2"),
    ],
)
def test_what_is_wrong_is_told(changed: dict[str, Any], words: str) -> None:
    assert trl_matrix.wrong(outcome(**changed)) == [words]


def test_the_table_has_a_row_for_each_run() -> None:
    failed = Outcome("1.15.0", 3, {}, (), Path("runs/x"))
    head, *lines = trl_matrix.table([outcome(), failed]).splitlines()
    assert head == f"| trl | {' | '.join(trl_matrix.COLUMNS)} | verdict |"
    assert lines == [
        "|---|---|---|---|---|---|---|---|---|---|",
        "| 1.16.0 | 0.014 | 0.698 | 60 | 2 | 0.967 | 1.041 | 2280 | 0 | ok |",
        "| 1.15.0 |  |  |  |  |  |  |  |  | exit status 3 |",
    ]


def test_the_version_that_is_installed_needs_no_environment() -> None:
    assert trl_matrix.environment(str(installed("trl"))) == Path(sys.executable)


def test_one_failed_run_fails_the_matrix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trl_matrix, "train", lambda version: outcome(status=int(version == "1.15.0")))
    assert trl_matrix.main(["1.16.0"]) == 0
    assert trl_matrix.main([]) == 1
    assert "exit status 1" in capsys.readouterr().out
    assert trl_matrix.main(["1.13.0"]) == 2
    assert "trl 1.13.0: not supported" in capsys.readouterr().err
