"""`plan`, `ramp` and `rl` read a configuration of every framework as `check` does."""

from __future__ import annotations

import pytest
import yaml

from tests.dialects import test_check as examples
from tests.dialects.configurations import checked

CASES = next(mark for mark in examples.test_the_framework_is_detected_and_the_batch_is_said.pytestmark).args[1]
NAMES = ("global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size")


@pytest.mark.parametrize("case", CASES, ids=[f"{case[2]}-{number}" for number, case in enumerate(CASES)])
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
