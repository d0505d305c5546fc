"""The table of devices and sizes in bytes."""

from __future__ import annotations

import pytest

from batchwright.core.errors import ConfigError
from batchwright.estimate.devices import DEVICES, device, human, memory


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


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("2.5GB", 2_500_000_000), ("512Mi", 2**29), (7, 7)])
def test_memory_is_read(text, size):
    assert memory(text) == size


def test_memory_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="memory='much'"):
        memory("much")
    assert human(2**40) == "1.00 TiB"
