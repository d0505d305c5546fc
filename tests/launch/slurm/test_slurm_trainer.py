"""Other trainers on a real Slurm: one node, then two, each launch a job whose command starts torchrun on every node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.launch.directory import RunDirectory
from batchwright.launch.ports import free_port
from batchwright.runtime import audit
from tests.needs import needs

pytestmark = [pytest.mark.torch, pytest.mark.rounds]
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(("example", "package"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_a_ramp_of_a_trainer_over_two_launches(cluster, tmp_path, example, package):
    needs(package)
    script, directory = EXAMPLES / example / "train.py", RunDirectory(tmp_path / "a run")
    # Every virtual node has the address of this machine; docs/huggingface.md asks scontrol for the first node.
    torchrun = (
        f"srun --ntasks-per-node 1 {sys.executable} -m torch.distributed.run --nnodes {{nodes}} --nproc-per-node 1 "
        f"--rdzv-backend c10d --rdzv-id {{launch}} --rdzv-endpoint 127.0.0.1:{free_port()} --local-addr 127.0.0.1"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "batchwright", "run", "--engine", "slurm", "launch.slurm.poll_seconds=0.5",
            "--thresholds", "0:8 64:16", *"--samples 128 --micro-batch-size 4 --nodes 2 --devices-per-node 1".split(),
            *"--node-policy constant-work --env OMP_NUM_THREADS=1 --env CUDA_VISIBLE_DEVICES=".split(),
            "--dir", str(directory.path), "--", "bash", "-c", f"exec {torchrun} {script} --out '{{run_dir}}/out'",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert [directory.manifest(number).nodes for number in directory.numbers()] == [1, 2]
    found = audit(directory.path)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.discarded_samples) == (True, 128, 0, 0, 0)
    assert len(list(directory.path.glob("ledger/launch-00002-*"))) == 2  # one for each rank
