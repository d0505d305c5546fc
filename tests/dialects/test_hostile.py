"""Values of every kind at every key of every framework: findings or errors, never a bug, and soon."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.cli.parse import scalar
from batchwright.core.errors import BatchwrightError
from batchwright.dialects import frameworks
from batchwright.dialects.checking import check
from batchwright.dialects.converting import convert
from batchwright.dialects.reading import read
from batchwright.dialects.record import Given
from tests.examples import many

odd = st.sampled_from(
    [
        "", "x", "auto", "none", "true", "-1", "0", "1.5", "1e400", "nan", "[1, 2]", "${a.b}", "4K", "1/0", "8,8", "0:4 10:8",
        True, False, 0, -1, -7, 10**15, 10**30, 1.5, float("nan"), float("inf"), [], [1], [1, 2, 3], ["a"], [[1]], [0, 0, 0],
        [{"start": 0, "value": 4}], [{"start": "x", "value": None}], [{"value": 0, "unit": "steps"}], [{}], "steps",
    ]
)  # fmt: skip
plain = st.sampled_from([1, 2, 4, 8, 16, 64, 256, 1024, "32", "[32, 8, 1000]", 4096])


def configurations(dialect):
    keys = sorted({*dialect.keys, *dialect.special, *dialect.checked, *dialect.steps, *dialect.in_samples})
    return st.dictionaries(st.sampled_from(keys), st.one_of(plain, odd), min_size=1, max_size=8)


@pytest.mark.parametrize("dialect", frameworks(), ids=lambda d: d.name)
@settings(deadline=None, max_examples=many(160))
@given(data=st.data())
def test_no_value_is_a_bug(dialect, data):
    keys = data.draw(configurations(dialect))
    target = data.draw(st.sampled_from(frameworks(dialect.kind)))
    world = data.draw(st.sampled_from([{}, {"devices": 8}, {"nodes": 2, "devices_per_node": 4}, {"devices": "x"}]))
    entries = [(key, Given(scalar(value), f"file: {key}", 0)) for key, value in keys.items()]
    begun = time.process_time()
    reading = read(entries, name=dialect.name, world={n: Given(v, f"--{n}", 2) for n, v in world.items()})
    report = check(reading)
    json.dumps(report.to_json(), allow_nan=False)
    assert all(finding.message for finding in report.findings)
    try:
        made = convert(reading, target)
    except BatchwrightError as error:
        assert str(error)
    else:
        assert made.status and (made.keys or made.differences)
    assert time.process_time() - begun < 2  # CPU time
