"""`run` takes a JaxTask: one process per node, a ramp over more of them, a kill in the middle, every sample once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import batchwright
from batchwright.core.errors import ConfigError, MissingExtraError
from batchwright.rundir import names
from batchwright.runtime.state.audit import audit
from tests.jax.devices import run as in_process
from tests.needs import needs

needs("jax")
needs("optax")
needs("orbax")

KILLED = Path(__file__).parent / "killed.py"


def run(folder: Path, **options):
    return batchwright.run(
        f"{KILLED}:task", thresholds="0:16 64:32", samples=136, micro_batch_size=4, nodes=2, devices_per_node=2,
        node_policy="constant-work", dir=str(folder), progress=False, retry_seconds=0, checkpoint_samples=32,
        allow_ragged=True, **options,
    )  # fmt: skip


def events(folder: Path, kind: str):
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("events/launch-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line["kind"] == kind]


def test_a_ramp_over_two_processes_survives_a_kill(tmp_path):
    # The dataset has a fingerprint, so no rows are read before training. The first launch dies at sample 56, in its fourth step.
    status = run(tmp_path / "run", arguments={"marker": str(tmp_path / "marker"), "reads": 56})
    assert (tmp_path / "marker").exists()
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 136, 1)
    found = audit(tmp_path / "run")
    assert (found.ok, found.samples, found.gaps, found.repeats, found.launches) == (True, 136, 0, 0, 3), found
    assert 0 < found.discarded_samples < 64
    assert found.ids_checked
    launches = [(event["nodes"], event["ranks"], event["samples"]) for event in events(tmp_path / "run", "launch")]
    assert launches == [(1, 2, 0), (1, 2, 32), (2, 4, 64)]
    steps = events(tmp_path / "run", "step")
    assert {(s["global_batch_size"], s["accumulation_steps"]) for s in steps} == {(16, 2), (32, 2), (8, 1)}
    checkpoint = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert json.loads((checkpoint / "state.json").read_text())["position"] == 136


@pytest.mark.rounds
def test_one_of_two_processes_is_killed_and_the_other_does_not_wait_for_ever(tmp_path):
    # Process 1 exists in the second stage only, and reads 16 rows per step: it dies while the first step computes.
    status = run(tmp_path / "run", arguments={"marker": str(tmp_path / "marker"), "reads": 20, "rank": "1"})
    assert (tmp_path / "marker").exists()
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 136, 1)
    found = audit(tmp_path / "run")
    assert (found.ok, found.samples, found.gaps, found.repeats, found.launches) == (True, 136, 0, 0, 3), found


def test_how_a_loop_steps_stops_and_fails(tmp_path):
    everything = in_process("cases", devices=2, directory=str(tmp_path))[0]
    found = everything["stops"]
    assert found["signal"] == ["stopped", "signal", 8, "SIGUSR1", True]
    assert found["after the signal"] == ["complete", 24]
    assert audit(tmp_path / "stops" / "signal").ok
    assert found["tokens"] == ["tokens", 16, True]
    assert found["ranks"] == [2, 2], "a rank is a device, in the status as in the events"
    assert "the loss was not finite in 2 steps in a row" in found["not finite"] and not found["not finite, saved"]
    assert "step 0: its weights add up to 0" in found["no weight"]
    assert "dataset[5], the sample at position 5 has the shape" in found["rows of two shapes"]
    assert found["no params"] == "JaxTask.params has no arrays."
    assert found["main"] == [2, 5]
    assert "pip install mlflow" in found["no tracker"] and not found["no tracker, claimed"]
    assert found["finite fp16 weights"] == ["complete", 1, [300.0, 300.0]]
    assert found["clipped fp16 gradient"] == pytest.approx([-(0.5**0.5)] * 2, abs=1e-3), (
        "inf was the norm, and 0 the step"
    )
    assert found["damaged"] == [24, 1], "the warning comes once"
    assert "its arrays are of position 24, and state.json says 7" in found["another position"]
    assert found["like numpy"] == [[0.0, 1.0, 2.0], 5]
    assert "File too large" in found["disk"] and "ulimit -f" in found["disk"]
    waits, total = everything["waits"]
    assert all(wait >= 0.05 for wait in waits[:-1]) and total >= 0.2
    ours, theirs, norms = everything["by_hand"]
    assert ours == pytest.approx(theirs, rel=1e-6) and min(norms) > 0.05, "clipping changes both steps"
    assert everything["compiled"] == [[[0, 1, 2], 3], [[0], 1]], "compiles_at, and the programs of a real run"


def test_arrays_on_four_devices(tmp_path):
    found = in_process("placed", devices=4, directory=str(tmp_path))[0]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5), "a mesh of data 1 × fsdp 4"
    # Both moments of both parameters; the unfactored moment; the accumulator and the momentum of the vector; …
    assert {name: found[name][1] for name in ("adam", "adafactor", "sm3", "muon")} == dict.fromkeys(
        ("adam", "adafactor", "sm3", "muon"), True
    )
    assert found["adam"][0] == 4, "the moments are placed as their parameters"
    assert found["maxtext"] == [[8, [1, 8, 2]]] * 5
    assert all("does not divide the 4 devices" in message for message in found["meshes"])
    assert found["exact"] == [True, [], [[1, True], [2, True]]]
    assert found["reduces"] == [False, ["rank-dependent"], [[1, False], [2, False]]]
    assert "8 samples on 3 devices" in found["three"] and "6 or 9; or give JaxTask.blank" in found["three"]


def test_processes_agree_on_the_dataset_and_hear_the_error_of_the_one_that_reads(tmp_path):
    first, second = in_process("agreed", processes=2, directory=str(tmp_path))
    # 8 samples, read twice: a dataset may draw, and then it cannot be recognised.
    assert first["reads"] == [0, 24] and second["reads"] == [24 + 16, 24]
    assert first["ours"] == second["ours"] == ["PlanError", "a.jsonl is not here.", "path"]
    failed = "process 1: reading samples for the fingerprint of the dataset failed: ValueError: row 17 is not JSON"
    assert first["plain"] == ["RunError", failed, "dataset"]
    assert second["plain"] == ["ValueError", "row 17 is not JSON", None]
    assert first["listing"] == ["PermissionError", "not yours", None]
    listing = "process 0: listing the checkpoints failed: PermissionError: not yours"
    assert second["listing"] == ["RunError", listing, "checkpoint"]
    said = "the processes have datasets of different lengths: 64 on process 0, 60 on process 1."
    for found in (first, second):
        assert found["lengths"][0] == "RunError" and found["lengths"][1].startswith(said)
        assert found["lengths"][2] == "dataset"
        assert found["written"] == ["reads"], "a refused launch writes nothing"
    assert first["no length"] == ["RunError", "process 1: len(dataset) failed: FileNotFoundError: no bucket", "dataset"]
    assert second["no length"][:2] == ["FileNotFoundError", "no bucket"]


@pytest.mark.rounds
def test_one_of_two_nodes_reads_for_both(tmp_path):
    made = batchwright.run(
        f"{KILLED}:task", thresholds="0:16", samples=48, micro_batch_size=4, nodes=2, devices_per_node=2, loading_hosts=1,
        node_policy="constant", dir=str(tmp_path / "run"), progress=False, arguments={"marker": str(tmp_path / "marker")},
    )  # fmt: skip
    assert made.state == "complete" and audit(tmp_path / "run").ok
    loading = json.loads((tmp_path / "run" / names.status(1)).read_text())["loading"]
    assert [loading[key] for key in ("readers", "hosts", "loading_hosts", "rows_read", "rows_trained")] == [
        1,
        2,
        1,
        48,
        48,
    ]


@pytest.mark.parametrize(
    ("ramp", "sizes", "note"),
    [
        ("--thresholds|0:16 256:32 512:64|--devices|2", [(8, 1), (8, 2), (8, 4)], "8 to 32, it would compile 3 times"),
        (
            "enable_rampup_batch_size=true|per_device_batch_size=12|per_device_batch_size_start=4|--devices|8",
            [(2, 2), (2, 3), (2, 4), (2, 5), (2, 6)],
            "4 to 12, it would compile 5 times",
        ),
        (
            "--thresholds|0:16 64:32|--devices|2|--accumulation-steps|2",
            [(4, 2), (8, 2)],
            "JAX compiles 2 times, at each new micro batch",
        ),
    ],
)
def test_a_planned_ramp_has_one_shape(run_command, ramp, sizes, note):
    command = ["run", f"{KILLED}:task", *ramp.split("|"), "--samples", "4952", "--arg", "marker=x", "--dry-run"]
    code, out, err = run_command(*command, "--json")
    assert code == 0, err
    assert [(stage["micro_batch_size"], stage["accumulation_steps"]) for stage in json.loads(out)["stages"]] == sizes
    assert note in " ".join(run_command(*command)[1].split())


def test_torchrun_does_not_start_the_processes_of_jax_on_slurm(run_command, tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("launch: {engine: slurm, slurm: {launcher: torchrun}}\n")
    flags = ["--global-batch-size", "8", "--samples", "64", "--devices", "1", "--arg", "marker=x", "--dry-run"]
    code, _, err = run_command("run", f"{KILLED}:task", *flags, str(file))
    assert code == 2 and "launcher=torchrun does not start a JaxTask" in err, err


def test_epochs_ask_the_task_and_a_missing_package_is_named(tmp_path, monkeypatch):
    from batchwright.launch.dataset import dataset_size
    from batchwright.launch.engine import check_machine
    from batchwright.launch.records import Options

    file = tmp_path / "sized.py"
    file.write_text(
        "import optax\nfrom batchwright.jax import JaxTask\n"
        "def task(n): return JaxTask({'w': 1.0}, lambda p, b: (b.sum(), 1), optax.sgd(0.1), range(n))\n"
    )
    assert dataset_size(f"{file}:task", {"n": 7}, Options()) == 7
    monkeypatch.setattr("batchwright.launch.engine.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"a JaxTask needs jax, optax, orbax, .*'batchwright\[jax\]'"):
        check_machine(Options(), direct=False, target=f"{file}:task")


def test_what_a_loop_must_survive(tmp_path):
    found = in_process("edges", devices=2, directory=str(tmp_path))[0]
    assert found["params that are arrays"] == [[24, 24], [1.0, 1.0]], "the user's arrays are donated"
    assert found["a rank with blank rows only"] == [17, True], "a mean over blank rows, 0/0, reached the weights"
    assert (
        "the loss returned one value of type array. It must return (loss_sum, weight)"
        in found["a loss without a weight"]
    )
    assert "JaxTask.blank weighs 1 in the loss" in found["a blank row that weighs"]
    assert "none of the 1 checkpoints in" in found["damaged"] and "start in another directory" in found["damaged"]
    assert "has schema 99, but this version of batchwright reads up to" in found["newer"]
    assert found["compiled"] == [1, 1], "one program per launch, also after a checkpoint"
    assert found["begun elsewhere"] == ["complete", 5, 40]
    begun = audit(tmp_path / "begun elsewhere")
    assert (begun.ok, begun.samples, begun.gaps) == (True, 24, 0), "the samples before start_sample are not trained"


@pytest.mark.rounds
def test_sharded_parameters_train_as_replicated_ones_and_go_on_after_a_boundary(tmp_path):
    found = in_process("trained", devices=4, directory=str(tmp_path))[0]
    for run in found.values():
        assert run["ends"] == [["stopped", "boundary", 112], ["complete", "end", 250]]
    replicated, sharded = found["replicated"]["steps"], found["sharded"]["steps"]
    assert [step[0] for step in replicated] == list(range(len(replicated))) and len(
        {step[3] for step in replicated}
    ) > 2
    for one, other in zip(replicated, sharded, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name in found:
        audited = audit(tmp_path / name)
        assert (audited.ok, audited.samples, audited.repeats, audited.launches) == (True, 250, 0, 2), audited


def test_a_setting_that_the_loop_does_not_have_is_refused():
    from batchwright.jax.session import refuse
    from batchwright.runtime.loop.settings import Settings

    with pytest.raises(ConfigError) as caught:
        refuse(Settings(directory="run", evaluation_samples=8, read_timeout=9.0, pipeline_schedule="gpipe"))
    for given in ("evaluation_samples=8", "read_timeout=9.0", "pipeline_schedule='gpipe'"):
        assert given in str(caught.value)
    refuse(Settings(directory="run", max_norm=1.0, keep=3))
