"""Errors and notes name a field as the user wrote it: a flag, a key of a file, or another framework's key."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli import GROUPS, cli
from batchwright.cli.naming import Names, _names

VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
SPLIT = ("--micro-batch-size", "3", "--data-parallel-size", "64")


def command_of(verb: str) -> click.Command:
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None
    return found


def options_of(verb: str) -> list[click.Option]:
    return [p for p in command_of(verb).params if isinstance(p, click.Option)]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_every_verb_is_named_by_its_flag(verb):
    for option in options_of(verb):
        flag = option.opts[0]
        keyword = flag[2:].replace("-", "_")
        value = True if option.is_flag else "7"
        ctx = click.Context(command_of(verb))
        ctx.params = {str(option.name): value}
        shown = "" if option.is_flag else "=7"
        error = _names(ctx).spell(f"{keyword}={value} is wrong. Nearest: {keyword}={value}.", keyword)
        assert error == f"{flag}{shown} is wrong. Nearest: {flag}{shown}."
        empty = click.Context(command_of(verb))
        assert _names(empty).spell(f"{keyword} is required.", keyword) == f"{flag} is required."


@pytest.mark.parametrize("verb", VERBS)
def test_the_keyword_of_a_flag_is_its_name_in_python(verb):
    # Options whose Python name differs hold something else than their keyword's value.
    renamed = {o.opts[0] for o in options_of(verb) if o.name != o.opts[0][2:].replace("-", "_")}
    assert renamed <= {"--json", "--arg", "--csv", "--status", "--stop"}


NAMES = Names(
    {
        name: "--" + name.replace("_", "-")
        for name in (
            "global_batch_size", "micro_batch_size", "max_micro_batch_size", "data_parallel_size", "nodes", "devices",
            "devices_per_node", "samples", "tokens", "lr", "allow_ragged", "allow_falling", "memory", "accumulation_steps",
        )
    },
    {
        "global_batch_size": ("1Ki", "--global-batch-size"), "micro_batch_size": (4, "data.micro_batch_size"),
        "nodes": ("8", "--nodes"), "samples": ("1M", "--samples"), "memory": ("2GiB", "--memory"),
        "devices": (64, None),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        # The value that was given, however it is written; a key of a file or of another framework stays that key.
        ("global_batch_size=1024 is odd.", "--global-batch-size=1024 is odd."),
        ("It is global_batch_size=1,024.", "It is --global-batch-size=1,024."),
        ("It has memory=2,147,483,648 bytes.", "It has --memory=2,147,483,648 bytes."),
        ("micro_batch_size 4 × nodes 8 = 32", "data.micro_batch_size 4 × --nodes 8 = 32"),
        # Values that were worked out, or are those of a stage, were not given.
        ("stage 2: global_batch_size=640 is odd", "stage 2: global_batch_size=640 is odd"),
        ("the global batch falls from 1024 to 32.", "the global batch falls from 1024 to 32."),
        ("data_parallel_size 64 × devices 64", "data_parallel_size 64 × devices 64"),
        ("4 / 8 data_parallel_size = 0.5", "4 / 8 data_parallel_size = 0.5"),
        # What is suggested can be given by its flag.
        ("Nearest: data_parallel_size=8, or nodes 4.", "Nearest: --data-parallel-size=8, or --nodes 4."),
        ("Nearest: 32, or allow_falling=True.", "Nearest: 32, or --allow-falling."),
        ("Or allow_ragged, where shares differ.", "Or --allow-ragged, where shares differ."),
        ("for that, give data_parallel_size=8.", "for that, give --data-parallel-size=8."),
        ("nodes and devices_per_node, or devices.", "--nodes and --devices-per-node, or devices."),
        # Flags of other programs stay as they are.
        ("nodes=8; ignored: --bf16=True '--fp16=True'", "--nodes=8; ignored: --bf16=True '--fp16=True'"),
        ("(devices, or nodes × devices_per_node)", "(devices, or --nodes × --devices-per-node)"),
        # Plain English.
        ("Nearest: 3 or 4 nodes.", "Nearest: 3 or 4 nodes."),
        ("samples 0 to 8, all nodes and devices", "samples 0 to 8, all nodes and devices"),
        ("8 samples of 16 tokens", "8 samples of 16 tokens"),
        # What the user wrote, paths, keys, places, variables, flags.
        ("'nodes=8' and \"micro_batch_size\" and `nodes=8`", "'nodes=8' and \"micro_batch_size\" and `nodes=8`"),
        ("the user's nodes=8 and the ranks' devices", "the user's --nodes=8 and the ranks' devices"),
        ("data.global_batch_size=1024 and world.nodes=8", "data.global_batch_size=1024 and world.nodes=8"),
        ("/runs/nodes=8/micro_batch_size.json", "/runs/nodes=8/micro_batch_size.json"),
        ("micro_batch_size.yaml, micro_batch_size/x", "micro_batch_size.yaml, micro_batch_size/x"),
        ("FILE.py:micro_batch_size, micro_batch_size()", "FILE.py:micro_batch_size, micro_batch_size()"),
        ("{micro_batch_size} and $nodes", "{micro_batch_size} and $nodes"),
        ("BATCHWRIGHT_nodes and my_micro_batch_size", "BATCHWRIGHT_nodes and my_micro_batch_size"),
        ("Give --micro-batch-size or --nodes 8.", "Give --micro-batch-size or --nodes 8."),
        ("recommended_micro_batch_size 4", "recommended_micro_batch_size 4"),
    ],
)  # fmt: skip
def test_a_message_is_rewritten_with_care(message, shown):
    assert NAMES.spell(message) == shown


def test_the_field_of_an_error_and_names_that_are_suggested():
    assert NAMES.spell("lr_scaling=sqrt needs lr, the rate.", "lr") == "lr_scaling=sqrt needs --lr, the rate."
    assert NAMES.spell("either samples or tokens", "samples") == "either --samples or --tokens"
    message = "micro_batchsize is not a known key. Did you mean micro_batch_size?"
    assert NAMES.spell(message, "micro_batchsize", {"micro_batch_size"}) == message


@given(st.text(st.sampled_from("no des=8'\"`{}/.-_micro_batch_size:×\n\\"), max_size=60))
def test_any_text_is_answered_and_a_second_time_nothing_changes(message):
    once = NAMES.spell(message)
    assert NAMES.spell(once) == once


def test_the_example_of_the_readme(cli):
    argv = ("plan", "--global-batch-size", "1000", *SPLIT)
    assert cli(*argv).err == (
        "error: --global-batch-size=1000 is not a whole number of accumulation steps: --micro-batch-size 3 × "
        "--data-parallel-size 64 = 192, and 1000 / 192 = 5.21. Nearest: 960 (5 steps) or 1152 (6 steps). "
        "Or give --allow-ragged: shares then differ by one sample.\n"
    )
    error = cli(*argv, "--json").json["error"]
    assert error["message"].startswith("global_batch_size=1000 is not") and "Or give allow_ragged" in error["message"]
    assert error["field"] == "global_batch_size"


def test_a_value_of_a_file_or_of_another_framework_is_named_by_its_key(cli, tmp_path):
    assert cli("plan", "data.global_batch_size=1000", *SPLIT).err.startswith(
        "error: data.global_batch_size=1000 is not"
    )
    assert cli("plan", "global_batch_size=1000", *SPLIT).err.startswith("error: global_batch_size=1000 is not")
    file = tmp_path / "job.yaml"
    file.write_text("batch: {global_batch_size: 1000, micro_batch_size: 3}\n")
    shown = cli("plan", file, "--data-parallel-size", "64").err
    assert shown.startswith("error: batch.global_batch_size=1000 is not")
    assert "batch.micro_batch_size 3 × --data-parallel-size 64 = 192" in shown
    # MaxText's number is per device: the message has another value, so it does not name MaxText's key.
    argv = (
        "per_device_batch_size=1.5",
        "ici_tensor_parallelism=2",
        "ici_fsdp_parallelism=8",
        "--global-batch-size",
        "100",
    )
    assert "per_device_batch_size 3" not in cli("plan", *argv).err


def test_other_verbs_name_flags_too(cli, tmp_path):
    probe = tmp_path / "probe.json"
    probe.write_text("{}")
    argv = ("--from-probe", str(probe), "--micro-step-seconds", "1,1", "--nodes", "1", "--devices-per-node", "1")
    shown = cli("ramp", "--thresholds", "0:8", *argv).err
    assert "error: --micro-step-seconds and --from-probe are mutually exclusive." in shown
    assert "error: --keep=0" in cli("run", "a.py:b", "--keep", "0", "--samples", "8", "--thresholds", "0:8").err
    assert "error: --updates=5" in cli("rl", "--prompts", "32", "--generations", "8", "--updates", "5").err
    assert "error: --linear and --thresholds " in cli("ramp", "--linear", "1,1,1", "--thresholds", "0:8").err
    assert "error: --multiple-of=0" in cli("probe", "--multiple-of", "0", "--", "true", "{micro_batch_size}").err
    assert "error: --seed=-1" in cli("check", "a.py:b", "--seed", "-1").err
    assert "error: --ranks=0" in cli("estimate", __file__ + ":b", "--ranks", "0").err


@pytest.mark.torch
def test_the_text_of_the_users_error_is_not_changed(cli, tmp_path):
    said = "micro_batch_size and seed=3 in f(micro_batch_size, x)"
    task = tmp_path / "mine.py"
    task.write_text(f"def task():\n    raise ValueError({said!r})\n")
    error = cli("check", f"{task}:task", "--seed", "3", "--micro-batch-size", "1").err.splitlines()[-1]
    assert error == f"error: {task}:task failed: ValueError: {said}"


def test_notes_name_flags_too(cli):
    ran = cli("plan", "--global-batch-size", "1000", *SPLIT, "--round", "down")
    assert "--global-batch-size 1000 -> 960" in " ".join(ran.out.split())
    assert "global_batch_size 1000 -> 960" in " ".join(
        cli("plan", "--global-batch-size", "1000", *SPLIT, "--round", "down", "--json").json["notes"]
    )
