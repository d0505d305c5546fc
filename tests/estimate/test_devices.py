"""The table of devices."""

from __future__ import annotations

import pytest

from batchwright.core.errors import ConfigError
from batchwright.estimate.devices import DEVICES, device


def test_every_device_says_where_its_number_comes_from():
    assert list(DEVICES) == sorted(DEVICES) and all(d.source for d in DEVICES.values())
    for d in DEVICES.values():
        if d.name.rsplit("-", 1)[-1].endswith("g"):
            assert d.memory_bytes <= int(d.name.rsplit("-", 1)[-1][:-1]) * 2**30


def test_an_unknown_device_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean h100-80g.*--memory 80GiB") as caught:
        device("h100")
    assert caught.value.nearest == ("h100-80g",)
    with pytest.raises(ConfigError, match="not in the table"):
        device("abacus")
