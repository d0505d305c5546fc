"""`batchwright ramp`: rules, nodes, output, errors."""

from __future__ import annotations

import csv
import io
import json
from fractions import Fraction

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import batchwright
from batchwright.cli.ramp import command
from batchwright.core.errors import BatchwrightError
from tests.examples import many


def run(*argv: str) -> str:
    result = CliRunner().invoke(command, list(argv), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*argv: str) -> dict:
    return json.loads(run(*argv, "--json"))


def sizes(document: dict) -> list[int]:
    return [stage["global_batch_size"] for stage in document["stages"]]


LINEAR = ("--linear", "256,128,50M", "--global-batch-size", "1024")


def test_linear_and_nemo_keys_give_the_same_stages():
    ours = run_json(*LINEAR)
    nemo = run_json("model.global_batch_size=1024", "model.rampup_batch_size=[256, 128, 50000000]")
    data = run_json("data.global_batch_size=1024", "data.rampup_batch_size=[256,128,50000000]")
    assert ours["stages"] == nemo["stages"] == data["stages"]
    assert sizes(ours) == [256, 384, 512, 640, 768, 896, 1024]


def test_json_has_the_keys_others_rely_on():
    document = run_json(
        *LINEAR, "--samples", "60M", "--micro-batch-size", "4", "--nodes", "4", "--devices-per-node", "8"
    )
    assert document["schema"] == 1
    for i, stage in enumerate(document["stages"]):
        assert stage["index"] == i
        assert stage["global_batch_size"] == (
            stage["micro_batch_size"] * stage["accumulation_steps"] * stage["data_parallel_size"]
        )
        assert stage["data_parallel_size"] == stage["nodes"] * 8
    assert document["stages"][0]["start_sample"] == 0
    assert document["stages"][-1]["end_sample"] == 60_000_000
    assert document["total_steps"] == sum(stage["steps"] for stage in document["stages"])
    assert document["node_hours"] is None


def test_an_open_end_is_null():
    last = run_json(*LINEAR)["stages"][-1]
    assert last["steps"] is None and last["end_sample"] is None


def test_the_launchers_documented_table():
    argv = ("--linear", "256,256,10M", "--global-batch-size", "2048", "--micro-batch-size", "4")
    document = run_json(*argv, "--nodes", "16", "--devices-per-node", "8")
    assert document["policy"] == "launcher"
    assert [stage["nodes"] for stage in document["stages"]] == [8, 8, 8, 8, 10, 12, 14, 16]
    assert [launch["nodes"] for launch in document["launches"]] == [8, 10, 12, 14, 16]
    every = run_json(*argv, "--nodes", "16", "--devices-per-node", "8", "--stop-every-stage")
    assert len(every["launches"]) == 8


def test_nemotron_days_are_the_published_ones():
    document = run_json(
        "--recipe",
        "nemotron-4-15b",
        "--nodes",
        "288",
        "--node-policy",
        "constant-work",
        "--stage-seconds",
        "0.57,0.58,0.64",
    )
    assert [stage["nodes"] for stage in document["stages"]] == [96, 192, 288]
    assert [round(stage["hours"] / 24, 1) for stage in document["stages"]] == [0.8, 0.4, 11.9]


MAXTEXT = (
    "enable_rampup_batch_size=True", "per_device_batch_size_start=4.0", "per_device_batch_size_increment=2.0",
    "global_rampup_samples=500", "per_device_batch_size=12.0", "--devices", "8",
)  # fmt: skip


def test_maxtext_keys():
    document = run_json(*MAXTEXT)
    assert [(s["global_batch_size"], s["steps"]) for s in document["stages"]] == [
        (32, 4),
        (48, 3),
        (64, 2),
        (80, 2),
        (96, None),
    ]
    assert [s["micro_batch_size"] for s in document["stages"]] == [4, 6, 8, 10, 12]


def test_maxtext_switched_off_is_a_constant():
    argv = ["enable_rampup_batch_size=False", *MAXTEXT[1:], "--global-batch-size", "96"]
    assert sizes(run_json(*argv)) == [96]


def test_megatron_flags():
    tokens = run_json("--step-batch-size-schedule", "0:384 200B:768 400B:1152", "--seq-length", "4096")
    assert [s["start_sample"] for s in tokens["stages"]] == [0, 48_828_288, 97_656_960]
    triple = run_json("--rampup-batch-size", "256", "128", "50000000", "--global-batch-size", "1024")
    assert sizes(triple) == sizes(run_json(*LINEAR))
    assert any("ignore it" in note for note in triple["notes"])


@pytest.mark.parametrize(
    "name", ["palm-540b", "llama-3-405b", "deepseek-v3", "bloom-176b", "mt-nlg-530b", "olmo-1b-warmup"]
)
def test_recipes_run(name):
    assert len(sizes(run_json("--recipe", name))) >= 3
    assert name in run("--list-recipes")
    assert any(r["name"] == name for r in run_json("--list-recipes")["recipes"])


def test_llama_changes_its_sequence_length_by_stage():
    stages = run_json("--recipe", "llama-3-405b")["stages"]
    assert [s["sequence_length"] for s in stages] == [4096, 8192, 8192]


def test_at_and_at_step_are_inverse():
    by_sample = run_json(*LINEAR, "--at", "30M")
    by_step = run_json(*LINEAR, "--at-step", str(by_sample["step"]))
    assert by_sample == by_step
    assert by_sample["start_sample"] <= 30_000_000 < by_sample["end_sample"]
    assert "global batch 640" in run(*LINEAR, "--at", "30M")


def test_compare_shows_the_dialects_difference():
    document = run_json("--linear", "256,256,10M", "--global-batch-size", "2048", "--compare", "linear,maxtext")
    assert document["ramp_steps"] == [14470, 14475]
    assert sum(s["difference"] for s in document["stages"]) == 5
    assert "14,475 (maxtext)" in run(
        "--linear", "256,256,10M", "--global-batch-size", "2048", "--compare", "megatron,maxtext"
    )


def test_csv_is_the_stages():
    rows = list(csv.DictReader(io.StringIO(run(*LINEAR, "--csv"))))
    assert [int(row["global_batch_size"]) for row in rows] == sizes(run_json(*LINEAR))
    assert rows[-1]["steps"] == ""


def test_a_ramp_from_a_position_shows_what_is_left():
    argv = (*LINEAR, "--samples", "100M", "--start-sample", "33333504")
    text = run(*argv, "--plot")
    assert text.startswith(
        "global batch 768 -> 1024, 3 of 7 stages left from step 83,551, sample 33,333,504 on; the last "
    )
    assert "left:  68,980 steps, 66,666,496 samples\n" in text
    assert [line.split()[:2] for line in text.splitlines()[3:6]] == [["5", "768"], ["6", "896"], ["7", "1,024"]]
    assert "640┤" not in text
    rows = list(csv.DictReader(io.StringIO(run(*argv, "--csv"))))
    assert [(row["index"], row["first_step"]) for row in rows] == [("4", "83551"), ("5", "94402"), ("6", "103703")]
    assert [stage["index"] for stage in run_json(*LINEAR, "start_sample=33333504")["stages"]] == [4, 5, 6]
    assert run(*LINEAR, "--start-sample", "0") == run(*LINEAR)


@pytest.mark.parametrize(
    "other", [("--at", "5"), ("--at-step", "5"), ("--compare", "linear,maxtext")], ids=["at", "at-step", "compare"]
)
def test_a_start_position_goes_with_no_lookup(other):
    with pytest.raises(BatchwrightError, match="are mutually exclusive"):
        run(*LINEAR, "--start-sample", "256", *other)


def test_plot_shows_the_stairs_and_no_escape_codes_in_a_pipe():
    text = run(*LINEAR, "--plot")
    assert "global batch" in text and "1024┤" in text and "\x1b" not in text
    assert "1024┤" not in run(*LINEAR), "a pipe gets no plot unless asked"


def test_many_stages_are_cut_in_text_and_whole_in_json():
    argv = ("--recipe", "bloom-176b")
    assert len(run_json(*argv)["stages"]) == 117
    assert "are not shown" in run(*argv) and len(run(*argv).splitlines()) < 40


def test_policies_need_times_and_say_so():
    argv = (*LINEAR, "--micro-batch-size", "4", "--nodes", "4", "--devices-per-node", "8", "--node-policy", "min-time")
    with pytest.raises(BatchwrightError, match=r"fixed_seconds|probe"):
        run(*argv)
    fast = run_json(*argv, "--samples", "60M", "--micro-step-seconds", "0.05,0.1")
    cheap = run_json(*argv[:-1], "min-node-hours", "--samples", "60M", "--micro-step-seconds", "0.05,0.1")
    assert fast["hours"] <= cheap["hours"] and cheap["node_hours"] <= fast["node_hours"]
    bounded = run_json(
        *argv[:-1],
        "min-node-hours",
        "--samples",
        "60M",
        "--micro-step-seconds",
        "0.05,0.1",
        "--deadline-hours",
        str((fast["hours"] + cheap["hours"]) / 2),
    )
    assert bounded["hours"] <= (fast["hours"] + cheap["hours"]) / 2


def test_times_from_a_probe(tmp_path):
    probe = tmp_path / "probe.json"
    trials = [{"micro_batch_size": m, "status": "fits", "step_seconds": 0.05 + 0.1 * m} for m in (1, 2, 4)]
    probe.write_text(json.dumps({"trials": trials}))
    argv = (*LINEAR, "--samples", "60M", "--micro-batch-size", "4", "--nodes", "4", "--devices-per-node", "8")
    measured = run_json(*argv, "--from-probe", str(probe))
    modelled = run_json(*argv, "--micro-step-seconds", "0.05,0.1")
    assert measured["node_hours"] == pytest.approx(modelled["node_hours"])


def test_a_bad_stage_is_named_and_ragged_accepts_it():
    argv = (
        "--thresholds",
        "0:256 10M:640 20M:1024",
        "--micro-batch-size",
        "4",
        "--nodes",
        "8",
        "--devices-per-node",
        "8",
        "--node-policy",
        "constant",
    )
    with pytest.raises(BatchwrightError, match="ramp stage 2 of 3") as caught:
        run(*argv)
    assert caught.value.field == "global_batch_size" and caught.value.nearest == (512, 768)
    assert "Other stages are valid" in str(caught.value)
    stage = run_json(*argv, "--allow-ragged")["stages"][1]
    assert stage["ragged"] and stage["accumulation_steps"] == 3  # ceil(ceil(640 / 64) / 4)


def test_pipeline_rules_hold_for_every_stage():
    argv = (
        "--thresholds",
        "0:64 1M:1024",
        "--micro-batch-size",
        "1",
        "--nodes",
        "8",
        "--devices-per-node",
        "8",
        "--pipeline-parallel",
        "4",
        "--virtual-stages",
        "2",
        "--node-policy",
        "constant",
    )
    assert run_json(*argv)["stages"][0]["accumulation_steps"] == 4
    with pytest.raises(BatchwrightError, match=r"ramp stage 1 of 2.*interleaved"):
        run("--thresholds", "0:32 1M:1024", *argv[2:])


def test_learning_rates():
    argv = ("--linear", "256,256,1M", "--global-batch-size", "1024", "--samples", "4M", "--optimizer", "AdamW")
    unasked = run_json(*argv, "--lr", "3e-4")
    assert {row["after"] for row in unasked["learning_rate"]} == {3e-4}, "never applied unasked"
    assert unasked["learning_rate_suggestion"]["rule"] == "sqrt"
    assert any("Suggested lr_scaling: sqrt" in note for note in unasked["notes"])
    scaled = run_json(*argv, "--lr", "3e-4", "--lr-scaling", "sqrt")["learning_rate"]
    assert scaled[-1]["after"] == pytest.approx(6e-4) and scaled[1]["before"] == pytest.approx(3e-4)
    late = run_json(*argv, "--lr-horizon-steps", "3906")["learning_rate_horizon"]
    assert not late["ok"] and late["off_by_samples"] == 2_554_624 - 4_000_000
    assert run_json(*argv, "--lr-horizon-samples", "4M")["learning_rate_horizon"]["ok"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--linear", "256,128"), "START,INCREMENT,SAMPLES"),
        (("--linear", "256,100,1M", "--global-batch-size", "1024"), "Nearest: 96"),
        (("--linear", "1024,128,1M", "--global-batch-size", "256"), "would fall"),
        (("--linear", "256,0,1M", "--global-batch-size", "256"), "increment=0"),
        (("--linear", "256,128,1M"), "needs --global-batch-size"),
        (("--linear", "256,128,1M", "--thresholds", "0:8", "--global-batch-size", "1024"), "mutually exclusive"),
        (("--thresholds", "0-8"), "THRESHOLD:SIZE"),
        (("--thresholds", "10:8"), "first threshold"),
        (("--thresholds-tokens", "0:8 1M:16"), "need --sequence-length"),
        (("--recipe", "palm"), "palm-540b"),
        (("--per-device", "1,1,4,15"), "number of devices"),
        (("--per-device", "0.5,1,4,15", "--devices", "3"), "not a whole number"),
        (("--doubling", "256,1M", "--global-batch-size", "1000"), "512 or 1024"),
        ((*LINEAR, "--nodes", "4"), "needs --devices-per-node"),
        ((*LINEAR, "--node-policy", "launcher"), "needs --nodes and --devices-per-node"),
        ((*LINEAR, "--node-policy", "fastest"), "launcher"),
        (
            (*LINEAR, "--start-sample", "5"),
            "--start-sample=5 is inside a step: step 0 owns samples 0 to 256. Nearest: 0",
        ),
        ((*LINEAR, "--samples", "512", "--start-sample", "512"), "nothing is left, since the ramp ends at sample 512"),
        ((*LINEAR, "--epochs", "0.3", "--dataset-size", "11"), r"--epochs=0.3 .*Nearest: 3/11 \(3 samples\) or 4/11"),
        ((*LINEAR, "--epochs", "2"), "--epochs=2 needs --dataset-size"),
        ((*LINEAR, "--samples", "1M", "--epochs", "1"), "--samples and --epochs are mutually exclusive"),
        ((*LINEAR, "--samples", "1M", "--tokens", "1M"), "--samples and --tokens are mutually exclusive"),
        ((*LINEAR, "--compare", "linear,levanter"), "linear,maxtext|two of"),
        ((*LINEAR, "--at", "-1"), "must be at least 0"),
        ((*LINEAR, "--lr-scaling", "sqrt"), "needs --lr,"),
        ((*LINEAR, "--from-probe", "/nonexistent.json"), "no such file"),
        ((*LINEAR, "ramp.linaer=1,2,3"), "linear"),
    ],
)
def test_errors_say_what_to_do(argv, message):
    with pytest.raises(BatchwrightError, match=message) as caught:
        run(*argv)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        (("--linear", "256,128,0", "--global-batch-size", "1024"), [1024]),
        (("--linear", "1024,128,1M", "--global-batch-size", "1024"), [1024]),
        (("--linear", "512,256,1M", "--global-batch-size", "256", "--allow-falling"), [512, 256]),
        (("--thresholds", "0:16 10:24 12:32"), [16, 32]),
        (("--doubling", "256,1000,steps", "--global-batch-size", "1024"), [256, 512, 1024]),
        (("--global-batch-size", "64"), [64]),
    ],
)
def test_edges_have_an_exact_meaning(argv, steps):
    assert sizes(run_json(*argv)) == steps


def test_a_project_file_holds_a_ramp(tmp_path):
    file = tmp_path / "batchwright.yaml"
    file.write_text(
        "batch: {global_batch_size: 1024, micro_batch_size: 4}\nworld: {nodes: 4, devices_per_node: 8}\n"
        "ramp: {linear: [256, 128, 50M], samples: 60M}\nnodes: {node_policy: constant-work}\n"
    )
    document = run_json(str(file))
    assert document["policy"] == "constant-work" and sizes(document)[0] == 256
    assert run_json(str(file), "nodes.node_policy=launcher")["policy"] == "launcher"


def test_python_has_the_same_verb():
    ramp = batchwright.ramp(linear=(256, 128, "50M"), global_batch_size=1024, samples="60M")
    shown = run_json(*LINEAR, "--samples", "60M")
    assert shown["sources"] == {
        "linear": "--linear",
        "global_batch_size": "--global-batch-size",
        "samples": "--samples",
    }
    assert ramp.to_json() | {"sources": shown["sources"]} == shown
    per_device = batchwright.ramp(per_device=(Fraction(1, 2), "1/2", 2, 100), devices=4, allow_ragged=True)
    assert [s.global_batch_size for s in per_device.schedule.segments] == [2, 4, 6, 8]


@settings(max_examples=many(150), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                "linear per-device thresholds thresholds-tokens thresholds-steps doubling recipe samples tokens last-step "
                "global-batch-size micro-batch-size nodes devices-per-node tensor-parallel pipeline-parallel node-policy "
                "micro-step-seconds stage-seconds restart-seconds lr lr-scaling at at-step compare sequence-length".split()
            ),
            st.one_of(
                st.integers(-2, 5000).map(str),
                st.sampled_from(
                    ["256,128,50M", "0:8 100:16", "1,1,4,15", "nan", "inf", "", "1e400", "linear,maxtext", "x"]
                ),
                st.text(max_size=8),
            ),
        ),
        max_size=6,
    )
)
@example([("recipe", "")])
def test_nothing_a_user_types_gives_a_traceback(pairs):
    argv = [word for name, value in pairs for word in (f"--{name}={value}",)]
    result = CliRunner().invoke(command, argv)
    assert result.exception is None or isinstance(result.exception, (BatchwrightError, SystemExit)), result.exception


def test_a_note_says_that_the_budget_ends_before_the_target(cli):
    argv = ("ramp", "--linear", "256,128,50M", "--global-batch-size", "1024", "--json", "--samples")
    assert any(
        "the last batch is 256, and the run does not reach 1024" in note for note in cli(*argv, "1M").json["notes"]
    )
    assert not any("not reach" in note for note in cli(*argv, "60M").json["notes"])


def test_experts_choose_nodes_where_they_can_and_are_noted_where_not(cli):
    argv = (
        "ramp",
        "--thresholds",
        "0:48 480:64",
        "--samples",
        "1120",
        "--micro-batch-size",
        "1",
        "--nodes",
        "4",
        "--devices-per-node",
        "8",
        "--node-policy",
        "constant-work",
        "--json",
    )
    assert [s["nodes"] for s in cli(*argv).json["stages"]] == [3, 4]
    assert [s["nodes"] for s in cli(*argv, "--expert-parallel", "16").json["stages"]] == [2, 4]
    noted = cli(*argv, "--expert-parallel", "64").json
    assert [s["nodes"] for s in noted["stages"]] == [3, 4]
    assert any("Megatron refuses" in note for note in noted["notes"])
