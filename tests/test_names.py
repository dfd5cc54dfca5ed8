import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import ConfigError
from jobs.names import WireName, check_run_name, parse_policy, parse_wire, policy_name, wire_name

RUNS = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
COUNTS = st.integers(1, 999_999_999)


@given(RUNS, COUNTS, COUNTS)
def test_names_map_both_ways(run: str, attempt: int, version: int) -> None:
    assert parse_wire(wire_name(run, attempt, version)) == WireName(run, attempt, version)
    assert parse_policy(policy_name(version)) == version


@pytest.mark.parametrize(
    "name", ["", "trl-policy", "trl-policy-v", "trl-policy-v0", "trl-policy-v01", "trl-policy-v1 ", "x-v1"]
)
def test_what_is_no_policy_name(name: str) -> None:
    assert parse_policy(name) is None


@pytest.mark.parametrize(
    "name", ["a.1.v0", "a.0.v1", "a.1.1", "../a.1.v1", "a/b.1.v1", "A.1.v1", "a.1.v1\n", "a.01.v1"]
)
def test_what_is_no_wire_name(name: str) -> None:
    assert parse_wire(name) is None


def test_a_run_name_fits_labels_keys_and_model_names() -> None:
    assert check_run_name("digit-2026") == "digit-2026"
    for bad in ("", "-a", "a.b", "a/b", "A", "a" * 64, "lr 4e-5, run #2"):
        with pytest.raises(ConfigError, match="1 to 63 characters"):
            check_run_name(bad)
