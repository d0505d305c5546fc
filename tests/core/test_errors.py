"""The tree of errors: types, exit codes, and the record that `--json` prints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright
from batchwright.core import errors
from batchwright.core.errors import BatchwrightError, ConfigError, PlanError, Violation, raise_violations

CODES = {
    "BatchwrightError": 1,
    "PlanError": 2,
    "ConfigError": 2,
    "ScheduleError": 2,
    "NothingFitsError": 3,
    "EnvironmentFault": 4,
    "MissingExtraError": 4,
    "RunError": 5,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_every_error_has_its_exit_code(name, code):
    kind = getattr(errors, name)
    assert issubclass(kind, BatchwrightError)
    assert kind.exit_code == code


def test_errors_are_also_what_python_programmers_expect():
    assert issubclass(PlanError, ValueError)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert issubclass(errors.MissingExtraError, errors.EnvironmentFault)


def test_an_error_has_the_fields_of_its_first_violation():
    first, second = Violation("one", "a", 1, (2,)), Violation("two", "b", 3)
    error = PlanError(violations=[first, second])
    assert (error.field, error.given, error.nearest, str(error)) == ("a", 1, (2,), "one\ntwo")
    assert [v["message"] for v in error.record()["violations"]] == ["one", "two"]


def test_no_violations_raise_nothing():
    raise_violations(PlanError, [])
    with pytest.raises(ConfigError):
        raise_violations(ConfigError, [Violation("x")])


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.fractions(),
)


@given(anything, st.lists(st.integers() | st.text(), max_size=3))
def test_a_record_of_any_value_is_strict_json(given_, nearest):
    record = PlanError("message", field="f", given=given_, nearest=nearest).record()
    again = json.loads(json.dumps(record, allow_nan=False))
    assert set(again) == {"type", "message", "field", "given", "nearest"}
    assert again["nearest"] == nearest


def test_one_error_lists_all_wrong_values():
    with pytest.raises(ConfigError) as caught:
        batchwright.plan(global_batch_size="x", micro_batch_size=-1, nodes=0, tensor_paralel=2, round="sideways")
    assert {v.field for v in caught.value.violations} == {"tensor_paralel"}  # spelling comes first
    with pytest.raises(ConfigError) as caught:
        batchwright.plan(global_batch_size="x", micro_batch_size=-1, nodes=0, round="sideways")
    assert [v.field for v in caught.value.violations] == ["global_batch_size", "micro_batch_size", "nodes", "round"]
