import pytest

from emulator.faults import Fault, Faults, parse
from jobs.errors import ConfigError


def test_the_language() -> None:
    spec = "kill replica[1] at step 30; preempt trainer after 60s;kill  proxy at step 3, bucket 503 5%; "
    spec += "bucket lag 2.5s; mount lag 4s; mount missing 30 s; mount listing 20s; "
    spec += "hang replica[0] 10s at step 4; bucket away 60s at step 20"
    assert parse(spec) == Faults(
        (
            Fault("kill", "replica", 1, step=30),
            Fault("preempt", "trainer", after_s=60.0),
            Fault("kill", "proxy", step=3),
            Fault("hang", "replica", 0, step=4, for_s=10.0),
            Fault("away", "bucket", step=20, for_s=60.0),
        ),
        0.05,
        2.5,
        4.0,
        30.0,
        20.0,
    )
    assert parse("") == parse(" ; ") == Faults()
    assert parse("tear publish v7; hang proxy 3s after 2s; jobs 500-after-create") == Faults(
        (Fault("tear", "publish", 7, step=0), Fault("hang", "proxy", after_s=2.0, for_s=3.0)), jobs_500=True
    )


@pytest.mark.parametrize(
    "spec",
    [
        "kill replica at step 3",
        "explode trainer after 3s",
        "kill trainer",
        "bucket 503",
        "lag 2s",
        "kill replica[x] at step 1",
    ],
)
def test_unknown_words_are_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; nearest: .*Known: kill replica\[N\]"):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bucket 503 5%", True),
        ("bucket lag 1s", True),
        ("bucket away 1s at step 2", True),
        ("tear publish v2", True),
        ("kill proxy at step 2; mount lag 1s; jobs 500-after-create", False),
    ],
)
def test_which_faults_need_a_bucket_that_can_misbehave(spec: str, expected: bool) -> None:
    assert parse(spec).of_bucket is expected


def test_a_bucket_that_always_fails_is_no_test() -> None:
    with pytest.raises(ConfigError, match="at most 99 %"):
        parse("bucket 503 100%")


def test_when_a_fault_is_due() -> None:
    at_step, after = parse("kill trainer at step 3; kill trainer after 5s").events
    assert [at_step.due(step, 100) for step in (0, 2, 3, 9)] == [False, False, True, True]
    assert [after.due(9, elapsed) for elapsed in (0.0, 4.9, 5.0)] == [False, False, True]


def test_a_replica_that_the_run_does_not_have_cannot_fail() -> None:
    faults = parse("kill replica[1] at step 2; hang replica[2] 3s after 1s; kill proxy at step 9")
    faults.check(3)
    with pytest.raises(ConfigError, match=r"'hang replica\[2\]': the run has 2, and counts them from 0"):
        faults.check(2)
