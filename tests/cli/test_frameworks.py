"""`plan`, `ramp` and `rl` read a configuration of every framework as `check` does."""

from __future__ import annotations

import json

import pytest
import yaml

from batchwright.dialects import flatten, framework
from tests.dialects import test_check as examples
from tests.dialects.configurations import checked

CASES = next(mark for mark in examples.test_the_framework_is_detected_and_the_batch_is_said.pytestmark).args[1]
NAMES = ("global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size")


every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case[2]}-{number}" for number, case in enumerate(CASES)])


@every_case
def test_every_framework_is_read_by_its_verb(cli, tmp_path, case):
    keys, world, name, _ = case
    made = checked(keys, **world).job
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(keys))
    flags = [word for key, value in world.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    if made.kind == "rl":
        ranks = made.get("data_parallel_size")
        found = cli("rl", file, *(["--data-parallel-size", str(ranks)] if world else []), "--json").json
        assert found["prompts_per_round"] == made.get("prompts"), name
        assert found["train_micro_responses"] == made.get("train_micro_responses")
        assert (found["updates_per_pass"], found["data_parallel_size"]) == (made.get("updates"), ranks)
        other = cli("plan", file)  # an error if it reads none of the keys, else a note
        assert "batchwright rl reads them" in " ".join((other.out + other.err).split())
    elif made.schedule is not None:
        stages = cli("ramp", file, *flags, "--node-policy", "constant", "--json").json["stages"]
        shape = [(s.first_step, s.global_batch_size) for s in made.schedule.segments]
        assert [(s["first_step"], s["global_batch_size"]) for s in stages] == shape
    elif world or "data_parallel_size" in made.numbers:
        found = cli("plan", file, *flags, "--json").json
        if made.get("pipeline_passes") is None:
            assert [found[n] for n in NAMES] == [made.get(n) for n in NAMES], name
        else:  # plan shows a micro batch whole, and its pieces as microbatches of the pipeline
            assert found["global_batch_size"] == made.get("global_batch_size")
            assert found["pipeline"]["pipeline_microbatches"] * made.get("pipeline_passes") == made.get(
                "accumulation_steps"
            )


@every_case
def test_a_pasted_line_is_read_whole_by_every_verb(cli, case):
    """Every key of a configuration as a flag, also those that other programs have, too (`--max_epochs`, `--num_layers`)."""
    keys, world, name, _ = case
    program = framework(name).programs
    flags = [
        word
        for key, value in flatten(keys).items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    line = ["python", program[0] if program else "train.py", *flags]
    line += [word for key, value in world.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    read = cli("check", *line, "--json").json
    made = read["numbers"]
    if framework(read["framework"]).kind == "rl":
        ranks = ["--data-parallel-size", str(made["data_parallel_size"])] if world else []
        found = cli("rl", *line[: len(line) - 2 * len(world)], *ranks, "--json").json
        theirs = (
            "prompts_per_round",
            "generations_per_prompt",
            "updates_per_pass",
            "iterations",
            "train_micro_responses",
        )
        ours = ("prompts", "generations", "updates", "iterations", "train_micro_responses")
        assert [found[n] for n in theirs] == [made[n] for n in ours], name
    elif "grown from" in read["equation"]:
        stages = cli("ramp", *line, "--node-policy", "constant", "--json").json["stages"]
        assert stages[-1]["global_batch_size"] == made["global_batch_size"]
    elif world or "data_parallel_size" in made:
        found = cli("plan", *line, "--json").json
        names = NAMES if "pipeline_passes" not in made else NAMES[:1]
        assert [found[n] for n in names] == [made[n] for n in names], name


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("axolotl train --base_model m --micro_batch_size 2 --gradient_accumulation_steps 4 --tensor_parallel_size 2 "
         "--devices 8", {"global_batch_size": 32}),
        ("python pretrain_gpt.py --micro-batch-size 2 --global-batch-size 64 --pipeline-model-parallel-size 4 --num-layers 32 "
         "--num-layers-per-virtual-pipeline-stage 2 --devices 8", {"global_batch_size": 64, "data_parallel_size": 2}),
        ("accelerate launch --num_processes 4 t.py --batch_size 16 --split_batches true --gradient_accumulation_steps 2",
         {"global_batch_size": 32}),
        ("python t.py --per_device_train_batch_size 4 --output_dir x --context-parallel-size 2 --device cuda --devices 8",
         {"global_batch_size": 32}),  # a key of another framework, and a word close to one of ours
    ],
)  # fmt: skip
def test_flags_that_other_programs_have_too_count_in_a_plan(cli, line, numbers):
    planned, checked_ = (cli(verb, *line.split(), "--json").json for verb in ("plan", "check"))
    assert {name: planned[name] for name in numbers} == numbers
    assert {name: checked_["numbers"][name] for name in numbers} == numbers


def test_flags_that_other_programs_have_too_count_in_a_round(cli):
    flat = "--rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256 --micro_train_batch_size 2 --max_epochs 2"
    dotted = (
        "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 --train.micro_batch_size 2"
    )
    for line, iterations in ((flat, 2), (dotted, 1)):
        found = cli("rl", *f"python3 -m openrlhf.cli.train_ppo_ray {line}".split(), "--json").json
        assert (found["responses_per_update"], found["train_micro_responses"], found["iterations"]) == (
            256,
            2,
            iterations,
        )
