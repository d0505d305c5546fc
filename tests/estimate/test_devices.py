"""The table of devices."""

from __future__ import annotations

import pytest

from batchwright.core.errors import ConfigError
from batchwright.estimate.devices import DEVICES, Allowance, device


def test_every_device_says_where_its_number_comes_from():
    assert list(DEVICES) == sorted(DEVICES) and all(d.source for d in DEVICES.values())
    for d in DEVICES.values():
        if d.name.rsplit("-", 1)[-1].endswith("g"):
            assert d.memory_bytes <= int(d.name.rsplit("-", 1)[-1][:-1]) * 2**30


def test_an_unknown_device_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean h100-80g.*--memory 80GiB") as caught:
        device("h10-80g")
    assert "h100-80g" in caught.value.nearest
    with pytest.raises(ConfigError, match="not in the table"):
        device("abacus")


def test_a_part_of_a_name_is_enough_where_only_one_name_has_it():
    for name in DEVICES:
        assert device(name).name == name
    short = {"h100": "h100-80g", "4090": "rtx-4090-24g", "RTX 4090": "rtx-4090-24g", "rtx_a6000": "rtx-a6000-48g"}
    assert {name: device(name).name for name in (*short, "A100-80GB")} == {**short, "A100-80GB": "a100-80g"}
    for name, candidates in {"a100": ("a100-40g", "a100-80g"), "v100": ("v100-16g", "v100-32g")}.items():
        with pytest.raises(ConfigError, match="is ambiguous: " + ", ".join(candidates)) as caught:
            device(name)
        assert caught.value.nearest == candidates


@pytest.mark.parametrize(
    ("size", "having"),
    [("64g", ("mi250x-64g",)), ("16 GB", ("t4-16g", "v100-16g")), ("80GiB", ("a100-80g", "h100-80g")), ("7g", ())],
)
def test_a_size_is_not_a_device_also_if_only_one_has_it(size, having):
    with pytest.raises(ConfigError, match=r"is a size.*, and not a name. Give a name, or --memory \d+GiB") as caught:
        device(size)
    assert caught.value.nearest == having


def test_an_allowance_leaves_exactly_what_it_says():
    allowance = DEVICES["rtx-4090-24g"].allowance
    usable = allowance.usable(24 * 2**30)
    needed = usable * 1.03 + (512 + 256) * 2**20
    assert needed <= 24 * 2**30 < needed + 2
    assert Allowance().usable(12345) == 12345
