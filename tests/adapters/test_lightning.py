"""The adapter for Lightning: what Lightning does alone, and what it does with the adapter."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import batchwright
from batchwright.core.errors import ConfigError, PlanError, RunError
from batchwright.runtime import GlobalOrder, audit
from tests.runtime.conftest import _run_ranks as run_ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`",
        "ignore:Checkpoint directory .* exists and is not empty",
        "ignore:The `srun` command is available",
        "ignore:The '.*_dataloader' does not have many workers",  # where there are many cores
        "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
    ),
]
SEED = 0


def importable() -> Any:
    from types import SimpleNamespace

    from batchwright.adapters.lightning import Steps, exact
    from tests.adapters import lit_cases

    return SimpleNamespace(**vars(lit_cases), Steps=Steps, exact=exact)


def errors(lit: Any, module: Any, data: Any, schedule: Any) -> list[float]:
    """The error of the gradient of every step, against the whole batch in float64."""
    order = GlobalOrder(len(data), seed=SEED)
    assert len(module.gradients) == schedule.total_steps
    steps = [schedule.at_step(k) for k in range(schedule.total_steps)]
    spans = [order.ids(range(s.start_sample, s.end_sample)) for s in steps]
    return [lit.error(g, lit.truth(ids, data)[0]) for g, ids in zip(module.gradients, spans, strict=True)]


def fit(lit: Any, folder: Path, kind: Any = None, *, data: Any = None, schedule: Any = None, **options: Any) -> Any:
    """Train an exact module; options of the loader are `loader`, all others those of the Trainer."""
    loader, checkpoint = options.pop("loader", {}), options.pop("ckpt_path", None)
    validation = options.pop("validation", None)
    module = lit.exact(kind or lit.Small)()
    trainer = lit.trainer(folder, **options)
    settings = {"micro_batch_size": 4, "collate": lit.collate, "seed": SEED, **loader}
    steps = lit.Steps(data or lit.rows(), schedule or lit.SCHEDULE, **settings)
    trainer.fit(module, steps, validation, ckpt_path=checkpoint)
    return module


def test_lightning_alone_is_a_mean_of_means_and_divides_a_partial_window_by_k(lit, tmp_path):
    data = lit.rows(40)
    module = lit.Small()
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=lit.collate)
    lit.trainer(tmp_path, accumulate_grad_batches=8).fit(module, loader)
    full, partial = module.gradients
    assert lit.error(full, lit.truth(range(32), data)[0]) == pytest.approx(0.29, abs=0.005)  # as docs/lightning.md says
    wanted = lit.truth(range(32, 40), data)[0]
    assert float(partial @ wanted / wanted.norm() ** 2) == pytest.approx(0.25, abs=0.02)  # 2 of 8 micro batches


def test_every_step_of_a_ramp_has_the_gradient_of_the_whole_batch(lit, tmp_path):
    module = fit(lit, tmp_path)
    data = lit.rows()
    assert max(errors(lit, module, data, lit.SCHEDULE)) <= 1e-5
    last = GlobalOrder(256, seed=SEED).ids(range(224, 256))
    logged = module.trainer.callback_metrics
    assert float(logged["exact_loss"]) == pytest.approx(lit.truth(last, data)[1], abs=1e-5)
    assert (float(logged["global_batch_size"]), float(logged["consumed_samples"])) == (32, 256)
    assert float(logged["train_loss"]) != pytest.approx(float(logged["exact_loss"]), abs=1e-5)  # the last micro batch's
    assert module.trainer.estimated_stepping_batches == lit.SCHEDULE.total_steps == 13


def test_clipping_validation_intervals_workers_and_ragged_steps(lit, tmp_path):
    from batchwright import Thresholds

    class Clipped(lit.Small):
        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
            super().configure_gradient_clipping(optimizer, **options)
            self.norms = [*getattr(self, "norms", []), float(lit.flat(self).norm())]

    schedule = Thresholds(((0, 6), (36, 13), (88, 26))).compile().until(samples=256)
    module = fit(
        lit,
        tmp_path,
        Clipped,
        schedule=schedule,
        gradient_clip_val=0.01,
        val_check_interval=4,
        reload_dataloaders_every_n_epochs=1,
        validation=torch.utils.data.DataLoader(lit.rows(8), batch_size=4, collate_fn=lit.collate),
        loader={"num_workers": 2, "allow_ragged": True},
    )
    assert max(errors(lit, module, lit.rows(), schedule)) <= 1e-5
    assert module.norms == pytest.approx([0.01] * schedule.total_steps, rel=1e-3)
    assert module.validated == [4, 8, 12, 16]


def test_samples_without_weight_do_not_make_nan(lit, tmp_path):
    data = [row[:1] if i % 3 else row for i, row in enumerate(lit.rows(48))]  # two of three have no label
    schedule = lit.Thresholds(((0, 8), (16, 16))).compile().until(samples=48)
    module = fit(lit, tmp_path, data=data, schedule=schedule, loader={"micro_batch_size": 1})
    assert max(errors(lit, module, data, schedule)) <= 1e-5


def test_half_precision_runs_every_micro_batch_in_it(lit, tmp_path):
    module = fit(lit, tmp_path, precision="bf16-mixed")
    assert max(errors(lit, module, lit.rows(), lit.SCHEDULE)) < 0.05  # bf16 has 8 bits


def test_the_learning_rate_counts_samples(lit, tmp_path):
    rates = []

    class Recorded(lit.Learns):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    fit(lit, tmp_path, Recorded, loader={"learning_rate": lambda sample: 1 - sample / 256})
    starts = [lit.SCHEDULE.at_step(k).start_sample for k in range(13)]
    assert rates == [0.5 * (1 - start / 256) for start in starts]


def test_hooks_of_the_module_get_micro_batches(lit, tmp_path):
    seen = []

    class Hooked(lit.Small):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(len(batch["tokens"]))
            return batch

        def training_step(self, batch: Any) -> Any:  # one argument, and a dict
            loss = self.loss(batch)
            self.log("epoch_loss", loss, on_epoch=True)
            return {"loss": loss, "other": 1}

    module = fit(lit, tmp_path, Hooked)
    assert max(errors(lit, module, lit.rows(), lit.SCHEDULE)) <= 1e-5
    # The first micro batch and its halves, for the test of the loss; then every micro batch, once.
    assert seen == [4] * 4 + [2, 2] + [4] * (256 // 4)


def test_a_loss_that_does_not_add_up_is_refused(lit, tmp_path):
    class Pairs(lit.Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            states = self.network(batch["tokens"]).mean(1)
            return torch.nn.functional.cross_entropy(states @ states.T, torch.arange(len(states)))

    with pytest.raises(RunError, match="the loss does not add up"):
        fit(lit, tmp_path, Pairs)

    class Tuples(lit.Small):
        """As SimCLR does: pairs of views, without labels."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, two = (self.network[1](view) for view in batch)
            return torch.nn.functional.cross_entropy(one @ two.T, torch.arange(len(one)))

    views = [(torch.randn(16), torch.randn(16)) for _ in range(16)]
    with pytest.raises(RunError, match=r"the loss does not add up.*counts 2 and 2 in the halves.*in-batch negatives"):
        fit(lit, tmp_path, Tuples, data=views, schedule=short(lit, 16), loader={"collate": None})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_a_wrong_weight_is_refused_where_all_losses_are_equal(lit, tmp_path, precision):
    from lightning.pytorch.plugins import MixedPrecision

    class New(lit.Small):
        """As a new model: every class is equally likely, so the loss is log 64 whatever the labels are."""

        def __init__(self) -> None:
            super().__init__()
            torch.nn.init.zeros_(self.network[-1].weight)
            torch.nn.init.zeros_(self.network[-1].bias)

    # Lightning replaces 16-mixed by bf16-mixed on a CPU, but takes the plugin.
    options = {"plugins": MixedPrecision(precision, "cpu")} if precision == "16-mixed" else {"precision": precision}
    fit(lit, tmp_path, New, schedule=short(lit, 8), **options)
    with pytest.raises(RunError, match=r"it is 0\.\d\d% away from .* its gradient [1-9]\d\.\d\d%"):
        fit(
            lit, tmp_path, New, schedule=short(lit, 8), loader={"weight": lambda batch: len(batch["tokens"])}, **options
        )


def asynchronous() -> Any:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    return {"plugins": AsyncCheckpointIO()}


def module(lit: Any, **members: Any) -> Any:
    return {"kind": type("Mine", (lit.Small,), members)}


def optimizers(count: int = 1, interval: str | None = None) -> Any:
    """A `configure_optimizers` with that many optimizers, and a scheduler with this interval."""

    def configure(self: Any) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(count)]
        scheduler = torch.optim.lr_scheduler.StepLR(made[0], 1)
        return (made, [{"scheduler": scheduler, "interval": interval}]) if interval else made

    return {"configure_optimizers": configure}


REFUSED = {
    "accumulate_grad_batches=2: must be 1": lambda lit: {"accumulate_grad_batches": 2},
    "max_epochs=3: must be 1": lambda lit: {"max_epochs": 3},
    "max_epochs=1000: must be 1": lambda lit: {"max_epochs": None},  # Lightning's default
    "min_epochs=1: must not be given": lambda lit: {"min_epochs": 1},
    "min_steps=2: must not be given": lambda lit: {"min_steps": 2},
    "overfit_batches=4: must be 0": lambda lit: {"overfit_batches": 4},
    "AsyncCheckpointIO: must not be used": lambda lit: asynchronous(),
    "automatic_optimization=False: must be True": lambda lit: module(lit, automatic_optimization=False),
    "2 optimizers: must return one": lambda lit: module(lit, automatic_optimization=False, **optimizers(2)),
    "StepLR with interval='epoch': must have the interval 'step'": lambda lit: module(lit, **optimizers(1, "epoch")),
    "learning_rate=a scheduler: must be one of the two": lambda lit: {
        **module(lit, **optimizers(1, "step")),
        "loader": {"learning_rate": lambda sample: 1.0},
    },
    "training_step=dataloader_iter: must take a batch": lambda lit: module(
        lit, training_step=lambda self, dataloader_iter: None
    ),
}


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
def test_what_cannot_be_exact_is_refused_before_training(lit, tmp_path, monkeypatch, text):
    def trained(*_: Any) -> None:
        raise AssertionError("it was trained")

    monkeypatch.setattr(lit.Small, "training_step", trained)
    monkeypatch.setattr(lit.Small, "validation_step", trained)
    validation = torch.utils.data.DataLoader(lit.rows(8), batch_size=4, collate_fn=lit.collate)
    with pytest.raises(PlanError, match=re.escape(text)):
        fit(lit, tmp_path, num_sanity_val_steps=1, validation=validation, **REFUSED[text](lit))
    assert not list(tmp_path.rglob("ledger"))


def test_processes_of_torchrun_that_would_train_alone_are_refused(lit, tmp_path, monkeypatch):
    """On the CPU, Lightning's default is one device: under torchrun, each of two processes would be the only one."""
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(PlanError, match=r"devices=1: but torchrun started 2 processes.*devices × num_nodes must be 2"):
        fit(lit, tmp_path)
    assert not list(tmp_path.rglob("ledger"))


def test_everything_is_refused_at_once(lit, tmp_path):
    kind = module(lit, automatic_optimization=False, **optimizers(2))
    with pytest.raises(PlanError) as caught:
        fit(lit, tmp_path, max_epochs=3, **kind)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["max_epochs", "automatic_optimization", "configure_optimizers"]


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "static_graph"])
def test_a_strategy_that_was_not_tested_is_refused(lit, tmp_path, name):
    """On this machine Lightning itself refuses to make a Trainer with the first three: they need GPUs, or a package."""
    from lightning.pytorch import strategies

    from batchwright.adapters.lightning import _refused

    if name == "static_graph":
        made, text = strategies.DDPStrategy(static_graph=True), "static_graph=True: must be False"
    else:
        kind = getattr(strategies, name)
        made, text = kind.__new__(kind), f"strategy={name}: was not tested, and is refused: use one device, or ddp."
        strategies.Strategy.__init__(made)
    trainer, steps = lit.trainer(tmp_path), lit.Steps(lit.rows(), lit.SCHEDULE, micro_batch_size=4)
    trainer._accelerator_connector.strategy = made
    found = [violation.message for violation in _refused(lit.exact(lit.Small)(), trainer, steps)]
    assert [message.startswith(text) for message in found].count(True) == 1, found


@pytest.mark.parametrize(
    "name", ["GradientAccumulationScheduler", "BatchSizeFinder", "LearningRateFinder", "StochasticWeightAveraging"]
)
def test_a_callback_that_trains_by_itself_is_refused(lit, tmp_path, name):
    """Before it begins: two of them do in their `on_fit_start`."""
    import lightning as L

    class Data(L.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return lit.Steps(lit.rows(), lit.SCHEDULE, micro_batch_size=4, collate=lit.collate)

    given = {"GradientAccumulationScheduler": {"scheduling": {0: 1}}, "StochasticWeightAveraging": {"swa_lrs": 0.1}}
    callback = getattr(L.pytorch.callbacks, name)(**given.get(name, {}))
    module = lit.exact(type("Tuned", (lit.Small,), {"lr": 0.1}))()
    with pytest.raises(PlanError, match=f"callbacks={name}: must not be used"):
        lit.trainer(tmp_path, callbacks=[callback]).fit(module, datamodule=Data())


def test_a_module_that_is_no_class_or_stands_before_the_adapter_is_refused(lit, tmp_path):
    steps = lit.Steps(lit.rows(), lit.SCHEDULE, micro_batch_size=4, collate=lit.collate)

    class Before(lit.exact(lit.Small)):
        def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    with pytest.raises(
        PlanError, match=r"module=training_step: replaces a part of the adapter.*and then exact\(Mine\)"
    ):
        lit.trainer(tmp_path).fit(Before(), steps)
    with pytest.raises(PlanError, match=r"torch.compile\(module\): must not be compiled as a whole"):
        lit.trainer(tmp_path).fit(torch.compile(lit.exact(lit.Small)(), backend="eager"), steps)
    for wrong, name in ((lit.Small(), "Small(…)"), (torch.nn.Linear, "Linear")):
        with pytest.raises(ConfigError, match=re.escape(f"exact({name}): must be a class of lightning")):
            lit.exact(wrong)
    assert lit.exact(lit.exact(lit.Small)) is lit.exact(lit.Small)


def test_an_exact_module_is_pickled_and_copied_as_its_class(lit):
    """As `ddp_spawn` does."""
    module = lit.exact(lit.Learns)()
    module.network[1].weight.data.fill_(3.0)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(other) is lit.exact(lit.Learns) and float(other.network[1].weight.detach().min()) == 3.0


@pytest.mark.rounds
def test_ddp_spawn(lit, tmp_path):
    module = fit(lit, tmp_path, lit.Learns, data=lit.rows(64), schedule=short(lit, 64), strategy="ddp_spawn", devices=2)
    alone = fit(lit, tmp_path / "alone", lit.Learns, data=lit.rows(64), schedule=short(lit, 64))
    for a, b in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert audit(tmp_path / "batchwright").unsaved_samples == 64


def test_data_that_are_no_steps_are_refused(lit, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(lit.rows())

    loader = torch.utils.data.DataLoader(lit.rows(8), collate_fn=lit.collate)
    with pytest.raises(PlanError, match="train_dataloaders=DataLoader: must be batchwright"):
        lit.trainer(tmp_path).fit(lit.exact(lit.Small)(), loader)
    with pytest.raises(RunError, match="only an exact module can train"):
        lit.trainer(tmp_path).fit(lit.Small(), lit.Steps(lit.rows(), lit.SCHEDULE, micro_batch_size=4))
    for wrong in (loader, Stream()):
        with pytest.raises(
            ConfigError, match=f"dataset={type(wrong).__name__}: must be map-style.*collate_fn as collate"
        ):
            lit.Steps(wrong, lit.SCHEDULE)
    with pytest.raises(ConfigError, match="batch_size: in Steps it is micro_batch_size"):
        lit.Steps(lit.rows(), lit.SCHEDULE, batch_size=4)


def test_a_step_without_a_loss_is_refused(lit, tmp_path):
    class Nothing(lit.Small):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(RunError, match="training_step returned NoneType"):
        fit(lit, tmp_path, Nothing)


def test_batchnorm_is_named(lit, tmp_path):
    class Normalised(lit.Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(16)

        def loss(self, batch: Any) -> Any:
            states = self.norm(self.network[0](batch["tokens"]).transpose(1, 2)).transpose(1, 2)
            logits = self.network[1:](states).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    with pytest.warns(UserWarning, match="1 BatchNorm layer.*such as 'norm'"):
        fit(lit, tmp_path, Normalised, schedule=short(lit, 8), loader={"additive": False})


def test_a_scheduler_of_the_module_counts_steps(lit, tmp_path):
    rates = []

    class Scheduled(lit.Learns):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    fit(lit, tmp_path, Scheduled, schedule=short(lit, 32))
    assert rates == [0.5, 0.25, 0.125, 0.0625]


def test_a_checkpoint_that_was_validated_is_no_position(lit, tmp_path):
    module = fit(lit, tmp_path, lit.Learns, schedule=short(lit, 32))
    module.trainer.save_checkpoint(tmp_path / "whole.ckpt")
    validation = torch.utils.data.DataLoader(lit.rows(8), batch_size=4, collate_fn=lit.collate)
    lit.trainer(tmp_path).validate(module, validation, ckpt_path=str(tmp_path / "whole.ckpt"), verbose=False)
    steps = lit.Steps(lit.rows(), short(lit, 32), micro_batch_size=4, collate=lit.collate)
    trainer = lit.trainer(tmp_path)
    trainer.fit(module, steps)
    assert (trainer.global_step, steps.adapter.position) == (4, 32)


def test_a_hook_that_changes_labels_changes_the_weight(lit, tmp_path):
    """The weight is that of the batch as `training_step` gets it, in training and in the test of the loss."""

    class Masked(lit.Small):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            labels = batch["labels"].clone()
            labels[batch["tokens"] % 2 == 0] = -100
            labels[:, 0] = batch["labels"][:, 0]
            return {**batch, "labels": labels}

    data, schedule = lit.rows(32), short(lit, 32)
    module = fit(lit, tmp_path, Masked, data=data, schedule=schedule, loader={"micro_batch_size": 2})
    for k, found in enumerate(module.gradients):
        ids = GlobalOrder(32, seed=SEED).ids(range(8 * k, 8 * k + 8))
        model = lit.Small().double()
        model.loss(Masked.on_before_batch_transfer(model, lit.collate([data[i] for i in ids]), 0)).backward()
        assert lit.error(found, lit.flat(model)) <= 1e-5


def short(lit: Any, samples: int) -> Any:
    return lit.Thresholds(((0, 8),)).compile().until(samples=samples)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: Any) -> Path:
    """The environment of a launch of `batchwright run` that trains 32 samples in 4 steps."""
    folder = tmp_path / "run"
    batchwright.run(
        ["true"], thresholds="0:8", samples=32, micro_batch_size=4, devices=1, dir=folder, progress=False, max_retries=0
    )  # it leaves a plan
    told = {"RUN_DIR": folder, "STATUS_FILE": folder / "s", "LAUNCH": 7, "START_SAMPLE": 0, "END_SAMPLE": 32}
    for name, value in told.items():
        monkeypatch.setenv(f"BATCHWRIGHT_{name}", str(value))
    return folder


def launch(lit: Any, folder: Path, kind: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """A fit under `batchwright run`, whose schedule is that of the run."""
    every = options.pop("saves", None) or saving(lit, folder / "out")
    settings = {"enable_checkpointing": True, "callbacks": [*every, *callbacks], **options}
    module, trainer = lit.exact(kind or lit.Learns)(), lit.trainer(folder, **settings)
    trainer.fit(module, lit.Steps(lit.rows(), collate=lit.collate, seed=SEED))
    return trainer


def test_what_would_end_before_the_schedule_is_refused_under_run(lit, launched):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    early = {"max_steps": 3, "limit_train_batches": 0.5, "max_time": "00:00:01:00"}
    with pytest.raises(PlanError) as caught:
        launch(lit, launched, callbacks=[EarlyStopping("val_loss")], **early)
    for part in (
        "max_steps=3: must be at least 4",
        "limit_train_batches=0.5: must be 1.0",
        "EarlyStopping, Timer: must not be used",
    ):
        assert part in str(caught.value)
    for wrong in ({"save_last": True, "save_weights_only": True}, {"save_last": "link"}):
        with pytest.raises(PlanError, match="must have ModelCheckpoint"):
            launch(lit, launched, saves=[ModelCheckpoint(launched / "out", **wrong)])
    assert launch(lit, launched, max_steps=4).global_step == 4


def test_sigterm_ends_the_process_again_after_a_fit_and_after_an_error(lit, launched, monkeypatch):
    heard = []

    class Fails(lit.Learns):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            heard.append(signal.getsignal(signal.SIGTERM))
            raise ZeroDivisionError

    outside, before = signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.SIG_DFL
    try:
        launch(lit, launched)
        assert signal.getsignal(signal.SIGTERM) is before
        monkeypatch.setenv("BATCHWRIGHT_LAUNCH", "8")
        with pytest.raises(ZeroDivisionError):
            launch(lit, launched, Fails)
        assert signal.getsignal(signal.SIGTERM) is before is not heard[0]
    finally:
        signal.signal(signal.SIGTERM, outside)


def test_a_step_that_the_module_does_not_apply_is_an_error_and_ends_the_launch(lit, tmp_path):
    class Skips(lit.Learns):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    steps = lit.Steps(lit.rows(), short(lit, 32), micro_batch_size=4, collate=lit.collate)
    with pytest.raises(RunError, match=r"optimizer_step of the module did not call optimizer\.step in step 1"):
        lit.trainer(tmp_path).fit(lit.exact(Skips)(), steps)
    assert steps.adapter.position == 8 and steps.adapter._ledger is None
    assert (
        len(next(tmp_path.rglob("*.jsonl")).read_text().splitlines()) == 2
    )  # the header, and the step that was applied


def test_a_save_that_is_cut_off_leaves_the_checkpoint_before(lit, tmp_path, monkeypatch):
    path, trainer = tmp_path / "last.ckpt", fit(lit, tmp_path, schedule=short(lit, 8)).trainer
    trainer.save_checkpoint(path)
    saved = path.read_bytes()
    (tmp_path / ".last.ckpt.0.part").touch()  # by a launch that was killed

    def cut(descriptor: int) -> None:
        assert len(list(tmp_path.glob(".last.ckpt.*.part"))) == 1  # on the file system of its final name
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", cut)
        trainer.save_checkpoint(path)
    assert path.read_bytes() == saved and not list(tmp_path.glob(".last*"))
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=False)["global_step"] == 1


def saving(lit: Any, folder: Path) -> list[Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return [ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_top_k=1)]


def part(lit: Any, folder: Path, stop: int = -1, **options: Any) -> Any:
    """A launch that continues from the last checkpoint; with `stop` it ends after that step, and loses what was not saved."""
    resume = "last" if (folder / "last.ckpt").exists() else None
    settings = {"max_steps": stop, "enable_checkpointing": True, "callbacks": saving(lit, folder), "ckpt_path": resume}
    return fit(lit, folder, lit.Learns, **{**settings, **options})


def fabric(lit: Any, **ranks: Any) -> list[float]:
    """The error of the gradient of every step in Fabric, with the pieces of batchwright as they are."""
    import lightning as L

    from batchwright.runtime import Loader, StepSampler, accumulate

    data, order = lit.rows(), GlobalOrder(256, seed=SEED)
    runner = L.Fabric(accelerator="cpu", **{"devices": 1, **ranks})
    runner.launch()
    model = lit.Small().network
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    sampler = StepSampler(lit.SCHEDULE, 4, rank=runner.global_rank, ranks=runner.world_size)
    found = []
    for step in accumulate(Loader(data, order, sampler, collate=lit.collate), model):
        for micro in step:
            logits, labels = model(micro.data["tokens"]), micro.data["labels"].flatten()
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            step.backward(total, (labels != -100).sum())
        step.apply(optimizer)
        ids = order.ids(range(step.plan.start_sample, step.plan.end_sample))
        found.append(lit.error(lit.flat(model), lit.truth(ids, data)[0]))
    assert len(found) == 13
    return found


def test_fabric_takes_the_pieces_as_they_are(lit):
    assert max(fabric(lit)) <= 1e-5


def fabric_part(lit: Any, folder: Path, stop: int = 99, micro_batch_size: int = 4, **ranks: Any) -> Any:
    """As docs/lightning.md says: continue from what Fabric has saved, up to a step; the weights, and the ids of each step."""
    import lightning as L

    from batchwright.runtime import Loader, StepSampler, accumulate

    runner = L.Fabric(accelerator="cpu", **{"devices": 1, **ranks})
    runner.launch()
    model = lit.Small().network
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    state = {"model": model, "optimizer": optimizer, "position": 0}
    if (folder / "saved").exists():
        runner.load(folder / "saved", state)
    order, ids = GlobalOrder(256, seed=SEED), []
    sampler = StepSampler(
        lit.SCHEDULE, micro_batch_size, rank=runner.global_rank, ranks=runner.world_size, start=state["position"]
    )
    for step in accumulate(Loader(lit.rows(), order, sampler, collate=lit.collate), model):
        ids.append([])
        for micro in step:
            logits, labels = model(micro.data["tokens"]), micro.data["labels"].flatten()
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            step.backward(total, (labels != -100).sum())
            ids[-1] += micro.ids.tolist()
        state["position"] = step.apply(optimizer).end_sample
        if step.plan.step + 1 == stop:
            break
    runner.save(folder / "saved", state)
    return [p.detach().clone() for p in model.parameters()], ids


class Branch(torch.nn.Module):
    """A parameter that only the first micro batch of a step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scale if self.calls % 2 == 1 else x


def on_two(rank: int, folder: str) -> dict[str, Any]:
    """On two ranks: the gradients, a run that one rank continues, and one that continues that of one rank."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    lit, root = importable(), Path(folder)
    ranks = {"strategy": "ddp", "devices": 2}
    data = [row[:1] if i % 5 == 0 else row for i, row in enumerate(lit.rows())]
    module = fit(lit, root / "gradients", data=data, loader={"micro_batch_size": 2}, **ranks)
    looked = part(lit, root / "2-to-1", 6, **ranks)._Exact__written is not None
    last = part(lit, root / "1-to-2", loader={"micro_batch_size": 2}, **ranks)
    fabrics = [fabric_part(lit, root / "fabric-2-to-1", 6, **ranks), fabric_part(lit, root / "fabric-1-to-2", **ranks)]

    class Sometimes(lit.Learns):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Branch()

        def loss(self, batch: Any) -> Any:
            return self.branch(super().loss(batch))

    used = fit(
        lit,
        root / "unused",
        Sometimes,
        schedule=lit.Thresholds(((0, 16),)).compile().until(samples=32),
        loader={"additive": False},
        **{**ranks, "strategy": "ddp_find_unused_parameters_true"},
    )
    logged = float(module.trainer.callback_metrics["exact_loss"])
    return {
        "errors": errors(lit, module, data, lit.SCHEDULE) + fabric(lit, **ranks),
        "loss": logged,
        "scale": float(used.branch.scale.detach()),
        "fabric": [ids for _, ids in fabrics],
        "weights": [p.tolist() for p in fabrics[1][0]],
        "last": [p.tolist() for p in last.parameters()],
        "looked": looked,
    }


def test_two_ranks_are_exact_and_a_resume_changes_the_number_of_ranks(lit, tmp_path):
    whole = part(lit, tmp_path / "whole")
    part(lit, tmp_path / "1-to-2", 6)
    weights, ids = fabric_part(lit, tmp_path / "fabric")
    fabric_part(lit, tmp_path / "fabric-1-to-2", 6)
    first, second = run_ranks(on_two, 2, str(tmp_path))
    assert max(first["errors"] + second["errors"]) <= 1e-5
    assert first["loss"] == second["loss"]
    assert (first["looked"], second["looked"]) == (True, False)  # for last.ckpt: rank 0 reports
    assert first["scale"] == second["scale"] != 1.0  # synchronised, though the last micro batch does not use it
    # Fabric: the same samples in each step, and the same weights, on either number of ranks.
    joined = [
        [[*a, *b] for a, b in zip(*both, strict=True)] for both in zip(first["fabric"], second["fabric"], strict=True)
    ]
    last, rest = fabric_part(lit, tmp_path / "fabric-2-to-1", micro_batch_size=2)
    assert joined[0] + rest == ids == ids[:6] + joined[1]
    for a, b, c in zip(weights, last, first["weights"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, torch.tensor(c), atol=1e-5, rtol=0)
    again = part(lit, tmp_path / "2-to-1", loader={"micro_batch_size": 2})
    for name, discarded in (("whole", 0), ("2-to-1", 32), ("1-to-2", 32)):
        found = audit(tmp_path / name / "batchwright")  # compares the id of every sample with the order
        expected = (True, 0, 0, discarded)
        assert (found.ok, found.gaps, found.repeats, found.discarded_samples) == expected, (name, found)
        assert found.samples == 256 - 32, name  # the last save was at step 12
    for a, b, c in zip(whole.parameters(), again.parameters(), first["last"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, torch.tensor(c), atol=1e-5, rtol=0)  # 1 -> 2
    # The weights alone are another run, from its first sample on; a checkpoint of Lightning alone has no position.
    tuned = lit.exact(lit.Learns).load_from_checkpoint(tmp_path / "whole" / "last.ckpt")
    steps = lit.Steps(lit.rows(), lit.SCHEDULE, micro_batch_size=4, collate=lit.collate)
    lit.trainer(tmp_path / "tuned", max_steps=1).fit(tuned, steps)
    assert steps.adapter.position == 8
    plain = lit.trainer(tmp_path / "plain", max_steps=1)
    plain.fit(lit.Learns(), torch.utils.data.DataLoader(lit.rows(8), batch_size=4, collate_fn=lit.collate))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(RunError, match=r"plain.ckpt has no position"):
        fit(lit, tmp_path / "refused", lit.Learns, ckpt_path=str(tmp_path / "plain.ckpt"))


def causes(lit: Any, kind: Any, data: Any = None) -> tuple[Any, dict[str, str]]:
    """What `check` finds on a module and its loader, as a user's function returns them."""
    from batchwright.runtime import Task
    from batchwright.runtime.check import check

    loader = torch.utils.data.DataLoader(lit.rows(32), batch_size=4, collate_fn=lit.collate)
    report = check(Task.from_lightning(kind(), data or loader), global_batch_size=16, micro_batch_sizes=(4, 8))
    return report, {finding.cause: finding.message for finding in report.findings if finding.severity == "error"}


def test_check_names_what_lightning_does_to_a_module_as_it_is(lit):
    report, found = causes(lit, lit.Small)
    assert set(found) == {"mean-of-means", "partial-window"} and not report.ok
    assert "0.5× that of the micro batch" in found["partial-window"]
    assert "exact(MyModule)" in found["mean-of-means"] and "exact(MyModule)" in found["partial-window"]

    class Sum(lit.Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.network(batch["tokens"])
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            return total + 30 * self.network[1].weight.square().mean()  # an auxiliary mean in a sum

    assert "auxiliary-scaled" in causes(lit, Sum)[1]


def test_check_finds_nothing_in_an_exact_module(lit):
    import lightning as L

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return lit.Steps(lit.rows(32), lit.SCHEDULE, micro_batch_size=4, collate=lit.collate)

    report, found = causes(lit, lit.exact(lit.Small), Data())
    assert report.ok and not found
    assert max(split.relative_error for split in report.splits) < 1e-6


@pytest.fixture
def written(tmp_path: Path, monkeypatch: Any) -> Path:
    """A file with functions that return a module and its data: as it is, and exact."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom batchwright.adapters.lightning import Steps, exact\n"
        "from tests.adapters.lit_cases import SCHEDULE, Learns, collate, rows\n\n"
        "def pair():\n    return Learns(), torch.utils.data.DataLoader(rows(8), batch_size=4, collate_fn=collate)\n\n"
        "def exactly():\n    return exact(Learns)(), Steps(rows(8), SCHEDULE, collate=collate)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the processes that trace and try
    return path


def test_a_function_may_return_a_module_and_its_data(lit, written):
    from batchwright.runtime import load_task

    for name in ("pair", "exactly"):
        task = load_task(f"{written}:{name}")
        assert (task.framework, len(task.dataset)) == ("lightning", 8)
        optimizer = task.optimizer(task.build_model(0).parameters())
        assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 0.5
    made = batchwright.estimate(f"{written}:pair", micro_batch_sizes=(2, 4))
    parts = [point.breakdown for point in made.points]
    assert [part["parameters"] for part in parts] == [4 * (64 * 16 + 16 * 32 + 32 + 32 * 64 + 64)] * 2
    assert parts[1]["activations"] == pytest.approx(2 * parts[0]["activations"], rel=0.01)


def test_probe_trains_a_module_and_its_data(written, tmp_path, capsys):
    """In processes of its own, with a limit of memory."""
    from batchwright.cli import main

    with pytest.raises(SystemExit) as done:
        main(
            [
                *"probe --max=2 --memory=2GiB --limit-only --no-estimate --json".split(),
                f"{written}:exactly",
                f"--dir={tmp_path}",
            ]
        )
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    found = json.loads(out)
    assert found["max_micro_batch_size"] == 2
    assert {(trial["micro_batch_size"], trial["status"]) for trial in found["trials"]} >= {(2, "fits")}
