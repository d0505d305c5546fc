"""The byte GPT: real documents of different lengths, a loss that falls below the unigram entropy, any split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.core.ramp.rules import Constant
from batchwright.runtime.loop.train import Settings, train
from batchwright.runtime.state.audit import audit
from batchwright.runtime.task import load_task

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "bytegpt"
ARGS = {"size": "tiny", "sequence_length": 64, "files": 40, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def bytegpt():
    return load_task(f"{FOLDER / 'bytegpt.py'}:task", ARGS)


def test_documents_are_whole_files_in_order(bytegpt):
    documents = bytegpt.dataset
    lengths = {len(documents[i]) for i in range(len(documents))}
    assert len(lengths) > 10 and max(lengths) <= 66  # END, 64 bytes, END
    text = b"".join(bytes(int(t) for t in documents[i] if t < 256) for i in range(200))
    assert documents.data.tobytes().startswith(text)
    assert 2.5 < documents.unigram_entropy() < 4
    inputs, targets = bytegpt.collate([documents[0], documents[len(documents) - 1]])
    assert (
        inputs.shape == targets.shape
        and int((targets != -100).sum()) == len(documents[0]) + len(documents[len(documents) - 1]) - 2
    )
    loss, weight = bytegpt.loss(bytegpt.build_model(0), (inputs, targets))
    assert 4 < float(loss.detach() / weight) < 7  # log 264 = 5.6
    with pytest.raises(ValueError, match="size='huge': must be one of"):
        sys.modules[type(documents).__module__].task(size="huge")


@pytest.mark.slow
def test_the_loss_falls_below_the_unigram_entropy(bytegpt, tmp_path):
    schedule = Constant(16).compile().until(2400)
    options = {"micro_batch_size": 16, "evaluation_samples": 64, "progress": False, "max_norm": 1.0, "threads": 1}
    status = train(bytegpt, schedule, Settings(directory=str(tmp_path), **options))
    assert status.evaluation_loss < bytegpt.dataset.unigram_entropy()  # far below it with `small`: examples/bytegpt
    assert audit(tmp_path).ok


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    script = [str(FOLDER / "train.py"), "--dir", str(tmp_path / "run"), "--size", "tiny", "--files", "10"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**clean, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *script, "--samples", "192"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unigram entropy" in done.stdout and "ledger ok: 192 samples, each in exactly one step" in done.stdout
