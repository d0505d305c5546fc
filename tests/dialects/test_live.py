"""The same comparison with the packages that are installed here: transformers and trl."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_the_installed_package_gives_the_recorded_vectors(name):
    import json

    from tests.dialects import oracles
    from tests.dialects.test_vectors import vectors

    _, make = oracles.ORACLES[name]
    assert json.loads(json.dumps(make(Path(), Random(name)))) == vectors(name)


@pytest.mark.parametrize("size", [8, 9, 12, 16])
def test_accelerate_splits_a_batch_over_processes_or_refuses_it(size):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    from tests.dialects.configurations import checked

    sampler = BatchSampler(range(64), size, drop_last=False)
    keys = {"compute_environment": "LOCAL", "num_processes": 4, "split_batches": True, "batch_size": size}
    report = checked(keys, "accelerate")
    try:
        share = len(next(iter(BatchSamplerShard(sampler, 4, 0, split_batches=True))))
    except ValueError:
        assert not report.ok
    else:
        assert report.ok and report.job.get("micro_batch_size") == share


@pytest.mark.filterwarnings("ignore")
def test_lightning_refuses_a_scheduler_beside_a_fixed_accumulation(tmp_path):
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.dialects.configurations import causes, checked

    class Small(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, _):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = {"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    for steps in (1, 2):
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=1, accumulate_grad_batches=steps, default_root_dir=tmp_path,
            callbacks=[GradientAccumulationScheduler({0: 2})], **quiet,
        )  # fmt: skip
        keys = {"seed_everything": 1, "data.batch_size": 2}
        keys |= {"trainer.accumulate_grad_batches": steps, "trainer.callbacks": [callback]}
        report = checked(keys, "lightning")
        try:
            trainer.fit(Small(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
        except ValueError:
            assert steps == 2 and "!excluded-key" in causes(report)
        else:
            assert steps == 1 and report.ok
