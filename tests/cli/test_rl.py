"""`batchwright rl`."""

from __future__ import annotations

import pytest


def test_the_graph_is_shown_with_units(cli):
    ran = cli("rl", "--prompts", "32", "--generations", "8", "--train-micro-prompts", "4", "--updates", "2")
    assert ran.code == 0
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == (
        "effective batch 128 responses = 16 prompts × 8 generations; off-policy: at worst 1 update behind"
    )
    assert "round 32 prompts × 8 generations = 256 responses" in lines
    assert "update 16 prompts × 8 generations = 128 responses × 2 per round" in lines
    assert "micro 32 responses × 4 accumulation × 1 rank = 128 responses" in lines


def test_maxtexts_keys_and_flags_win(cli):
    found = cli(
        "rl",
        "batch_size=32",
        "rl.num_generations=8",
        "train_micro_batch_size=4",
        "rollout_micro_batch_size=-1",
        "rl.num_iterations=2",
        "--json",
    ).json
    assert found["schema"] == 1
    assert (found["responses_per_round"], found["accumulation_steps"], found["rollout_micro_steps"]) == (256, 8, 1)
    assert (found["on_policy"], found["worst_policy_lag_updates"]) == (False, 1)
    assert cli("rl", "prompts=32", "generations=8", "--prompts", "64", "--json").json["prompts_per_round"] == 64


@pytest.mark.parametrize("off", ["-1", "none", "null"])
def test_no_micro_batching(cli, off):
    found = cli("rl", "--prompts", "32", "--generations", "8", "--train-micro-prompts", off, "--json").json
    assert found["accumulation_steps"] == 1


def test_counts_always_say_what_they_count(cli):
    found = cli("rl", "--prompts", "32", "--generations", "8", "--json").json
    bare = {
        "updates_per_pass",
        "iterations",
        "updates_per_round",
        "data_parallel_size",
        "accumulation_steps",
        "rollout_micro_steps",
        "rounds_ahead",
        "on_policy",
        "worst_policy_lag_updates",
        "train_micro_given",
        "rollout_micro_given",
        "notes",
        "schema",
        "sources",
        "generations_per_prompt",
    }
    assert all("prompts" in name or "responses" in name for name in found if name not in bare)


def test_errors(cli):
    assert "--prompts is required." in cli("rl").err
    assert "--generations is required" in cli("rl", "--prompts", "4").err
    ran = cli("rl", "--prompts", "32", "--generations", "8", "--updates", "5", "--json")
    assert (ran.code, ran.json["error"]["nearest"]) == (2, [4, 8])
    slip = cli("rl", "promts=32", "generations=8")
    assert "Did you mean prompts" in slip.err
    twice = cli("rl", "prompts=32", "batch_size=64", "generations=8")
    assert "prompts has two different values: 32 (prompts=32) and 64 (batch_size=64)" in twice.err


def test_a_file_is_weakest_and_every_source_is_shown(cli, tmp_path):
    file = tmp_path / "rl.yaml"
    file.write_text("rl: {prompts: 16, generations: 4, num_iterations: 2}\nlearning_rate: 1e-6\n")
    found = cli("rl", str(file), "prompts=32", "--generations", "8", "--json").json
    assert (found["prompts_per_round"], found["generations_per_prompt"], found["iterations"]) == (32, 8, 2)
    assert found["sources"] == {
        "prompts": "prompts=32",
        "generations": "--generations",
        "iterations": f"{file}: rl.num_iterations",
    }


def test_maxtexts_micro_batch_counts_all_ranks(cli):
    argv = ("rl", "batch_size=32", "rl.num_generations=8", "train_micro_batch_size=4")
    assert cli(*argv, "--data-parallel-size", "4", "--json").json["accumulation_steps"] == 8  # batch / micro
    refused = cli(*argv, "--data-parallel-size", "8", "--json")
    assert (refused.code, refused.json["error"]["nearest"]) == (2, [8])


@pytest.mark.parametrize("given", [("micro_batch_size=2",), ("--micro-batch-size", "2")])
def test_the_examples_of_maxtexts_page(cli, given):
    found = cli("rl", "batch_size=8", "num_generations=16", *given, "--json").json
    assert (found["responses_per_update"], found["train_micro_responses"], found["accumulation_steps"]) == (128, 32, 4)
    assert (found["rollout_micro_prompts"], found["rollout_micro_steps"]) == (2, 4)
    assert "was read as prompts, as MaxText's code counts" in found["notes"][0]
    assert "page counts prompt-response pairs: for that reading give micro_batch_unit=responses." in found["notes"][0]


def test_one_micro_batch_for_both(cli):
    argv = ("rl", "batch_size=8", "num_generations=16")
    off = cli(*argv, "micro_batch_size=-1", "--json").json
    assert (off["accumulation_steps"], off["rollout_micro_steps"]) == (1, 1) and not off["notes"]
    ranks = cli(*argv, "micro_batch_size=4", "--data-parallel-size", "2", "--json").json
    assert (ranks["train_micro_prompts"], ranks["accumulation_steps"], ranks["rollout_micro_prompts"]) == (2, 2, 4)
    assert "for that reading give micro_batch_unit=responses." in ranks["notes"][0]
    none = cli(*argv, "micro_batch_size=4", "train_micro_batch_size=-1", "--json").json
    assert (none["accumulation_steps"], none["rollout_micro_steps"]) == (1, 2)
    own = cli(*argv, "micro_batch_size=4", "train_micro_batch_size=1", "--json").json
    assert (own["train_micro_prompts"], own["rollout_micro_prompts"]) == (1, 4)
    wrong = cli(*argv, "micro_batch_size=3", "--json")
    assert (wrong.code, wrong.json["error"]["field"], wrong.json["error"]["nearest"]) == (2, "micro_batch_size", [2, 4])
    odd = cli(*argv, "micro_batch_size=1", "--data-parallel-size", "16")
    assert "No number of prompts works: give --train-micro-responses" in odd.err


def test_the_unit_of_the_one_micro_batch(cli):
    """MaxText's page counts prompt-response pairs, its code prompts; the flag says which, and no note is needed."""
    argv = ("rl", "batch_size=8", "num_generations=16", "micro_batch_size=32")
    pairs = cli(*argv, "--micro-batch-unit", "responses", "--json").json
    assert (pairs["train_micro_responses"], pairs["accumulation_steps"]) == (32, 4)
    assert (pairs["rollout_micro_prompts"], pairs["rollout_micro_steps"]) == (2, 4)
    assert "was read as" not in str(pairs["notes"])
    small = cli(
        "rl", "batch_size=8", "num_generations=16", "micro_batch_size=2", "micro_batch_unit=responses", "--json"
    ).json
    assert (small["train_micro_responses"], small["rollout_micro_steps"]) == (2, 1)
    assert "not a part of the round in whole groups of 16" in small["notes"][0]
    ranks = cli(*argv, "micro_batch_unit=responses", "--data-parallel-size", "4", "--json").json
    assert (ranks["train_micro_responses"], ranks["accumulation_steps"]) == (8, 4)
    prompts = cli(
        "rl", "batch_size=8", "num_generations=16", "micro_batch_size=2", "--micro-batch-unit=prompts", "--json"
    ).json
    assert prompts["train_micro_prompts"] == 2 and "was read as" not in str(prompts["notes"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("micro_batch_size=32", "--micro-batch-unit=pairs"), "--micro-batch-unit='pairs' is not known. One of: prompts, resp"),
        (("--micro-batch-unit=prompts",), "--micro-batch-unit=prompts says what --micro-batch-size counts, and that is not"),
        (("micro_batch_size=24", "--micro-batch-unit=responses"), "it counts the responses of all ranks, an update has 128"),
        (("updates=3",), "Advantages are computed over whole groups, so a group belongs to one update. Nearest: 2 or 4"),
    ],
)  # fmt: skip
def test_answers_with_names(cli, given, message):
    failed = cli("rl", "batch_size=8", "num_generations=16", *given)
    assert failed.code == 2 and message in " ".join(failed.err.split())


def test_updates_that_span_rounds_and_smaller_last_updates(cli):
    trl = "per_device_train_batch_size=8 gradient_accumulation_steps=4 steps_per_generation=6 num_generations=8"
    spans = cli("rl", *trl.split(), "--data-parallel-size=4")
    assert spans.code == 2 and "updates span rounds" in spans.err and "Nearest: 4 or 8" in " ".join(spans.err.split())
    trl = "per_device_train_batch_size=4 gradient_accumulation_steps=1 steps_per_generation=4 num_generations=8"
    split = cli("rl", *trl.split())
    said = " ".join(split.err.split())
    assert split.code == 2 and "split groups: an update has per_device_train_batch_size 4 × 1 processes" in said
    assert "4 / num_generations 8 = 0.50 groups" in said and said.endswith(
        "Nearest: 2 for gradient_accumulation_steps."
    )
    assert cli("rl", *trl.replace("steps=1", "steps=2").split()).code == 0
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=24 data.train_batch_size=64 actor_rollout_ref.rollout.n=4"
    smaller = cli("rl", *mini.split())
    assert smaller.code == 2 and "smaller last update" in smaller.err
    assert "then has 16 prompts only" in " ".join(smaller.err.split())
