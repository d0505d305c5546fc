"""`plan` and `check` read one file alike: the same framework, the same defaults, the same numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from batchwright.cli.config import gather
from batchwright.cli.frameworks import read_configuration
from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, PlanError
from batchwright.dialects import frameworks
from tests.examples import many

sizes = st.sampled_from([1, 2, 4, 8, 16, 64, 512])


def fields_of_a_plan(arguments, flags):
    read = gather(arguments, flags)
    return {name: (str(value), read.origins[name]) for name, value in read.values.items()}


def fields_of_a_check(arguments, flags):
    read = read_configuration(arguments, (), flags, None)
    if any(finding.cause == "value" for finding in read.findings):
        raise PlanError("a value")
    return {name: (str(g.value), g.origin) for name, g in read.fields.items() if name in READERS}


def same(arguments, flags):
    found = []
    for read in (fields_of_a_plan, fields_of_a_check):
        try:
            found.append(read(arguments, flags))
        except PlanError:
            found.append(None)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("dialect", frameworks("train"), ids=lambda d: d.name)
@settings(deadline=None, max_examples=many(60))
@given(data=st.data())
def test_plan_and_check_read_the_same_numbers(dialect, data, tmp_path_factory):
    names = sorted({*dialect.keys, *dialect.special, *dialect.steps} - {"step_batch_size_schedule"})  # no number
    keys = data.draw(st.dictionaries(st.sampled_from(names), sizes, min_size=1, max_size=6))
    file = tmp_path_factory.mktemp("same") / "c.json"
    file.write_text(json.dumps(keys))
    world = data.draw(st.sampled_from([{}, {"devices": "8"}, {"nodes": "2", "devices_per_node": "4"}]))
    try:
        assume(read_configuration((str(file),), (), world, None).dialect.kind == "train")
    except ConfigError:
        reject()  # the keys alone belong to no framework
    same((str(file),), world)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # The framework's default counts in both.
        ({"c.yaml": "output_dir: x\ngradient_accumulation_steps: 4\n"}, {"micro_batch_size": "8"}),
        # A configuration of DeepSpeed that is named in the file is part of it.
        (
            {
                "c.yaml": "output_dir: x\nper_device_train_batch_size: 4\ndeepspeed: ds.json\n",
                "ds.json": '{"train_batch_size": 512}',
            },
            {"micro_batch_size": "4", "global_batch_size": "512"},
        ),
        ({"c.yaml": "trainer: {devices: auto, num_nodes: 2}\ndata: {micro_batch_size: 4}\n"}, {"nodes": "2"}),
    ],
)
def test_the_same_cases_of_files(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    fields = same((str(tmp_path / "c.yaml"),), {"devices": "8"} if "nodes" not in expected else {})
    assert {name: fields[name][0] for name in expected} == expected


def test_a_batch_that_is_asked_for_leaves_the_defaults_free(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("output_dir: x\nlogging_steps: 4\ngradient_accumulation_steps: 4\n")
    request = gather((str(file),), {"global_batch_size": "512", "devices": "8"}).request()
    assert request.micro_batch_size is None  # 16, and not 8 as by default, fits
    assert gather((str(file),), {"max_micro_batch_size": "6", "devices": "8"}).request().micro_batch_size is None
    assert gather((str(file),), {"devices": "8"}, defaults=False).request().micro_batch_size is None


def test_hydra_deletes_keys_in_a_plan_too(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "trainer: {devices: 8, num_nodes: 2}\n"
        "model: {micro_batch_size: 4, global_batch_size: 512, tensor_model_parallel_size: 2}\n"
    )
    read = same((str(file), "~model.global_batch_size", "++trainer.num_nodes=4"), {})
    assert "global_batch_size" not in read and read["nodes"][0] == "4" and read["tensor_parallel"][0] == "2"
