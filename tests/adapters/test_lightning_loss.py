"""The adapter for Lightning: what a loss is a mean over, hooks, memory, and what tasks see of a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import batchwright
from batchwright.core.errors import ConfigError, RunError
from batchwright.runtime import GlobalOrder, Task, audit
from tests.adapters.test_lightning import fit, short
from tests.needs import needs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`",
        "ignore:Checkpoint directory .* exists and is not empty",
        "ignore:The `srun` command is available",
        "ignore:The '.*_dataloader' does not have many workers",
        "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
        "ignore::DeprecationWarning",
    ),
]


def rows(count: int, least: int, most: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(least, most + 1, (count,), generator=draw).tolist()
    return [torch.randint(1, 32, (n,), generator=draw) for n in lengths]


def collate(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def wrapped(lit: Any, make: Any) -> Any:
    """A LightningModule around a model of transformers, as most users write it."""

    class Wrapped(lit.Small):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = make()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.network(**batch).loss

    return Wrapped


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )


@pytest.mark.parametrize(("least", "most", "micro"), [(3, 32, 4), (20, 200, 4), (3, 32, 1)])
def test_a_causal_model_of_transformers_in_a_module(lit, tmp_path, least, most, micro):
    """It shifts the labels itself: the first one of each row does not count. Every step of a ramp, single samples, long rows."""
    needs("transformers")
    kind, data = wrapped(lit, llama), rows(48, least, most)
    schedule = lit.Thresholds(((0, 8), (16, 16))).compile().until(samples=48)
    loader = {"micro_batch_size": micro, "collate": collate}
    module = fit(lit, tmp_path, kind, data=data, schedule=schedule, loader=loader)
    order = GlobalOrder(48, seed=0)
    for step, found in zip(map(schedule.at_step, range(4)), module.gradients, strict=True):
        model = kind().double()
        ids = order.ids(range(step.start_sample, step.end_sample))
        model.network(**collate([data[i] for i in ids])).loss.backward()
        assert lit.error(found, lit.flat(model)) <= 1e-5


def test_a_router_is_named_and_accepted(lit, tmp_path):
    needs("transformers")
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixtral() -> Any:
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1,
            )
        )  # fmt: skip

    with pytest.warns(UserWarning, match="The balance loss of the router is a statistic of each micro batch"):
        fit(
            lit, tmp_path, wrapped(lit, mixtral), data=rows(8, 3, 32), schedule=short(lit, 8), loader={"collate": collate}
        )  # fmt: skip


class Vectors(torch.utils.data.Dataset):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.rows = [(torch.randn(8, generator=draw), torch.tensor(i % 4)) for i in range(32)]

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def linear(lit: Any, **members: Any) -> Any:
    """A module on pairs of tensors that counts its runs in a buffer."""

    def __init__(self: Any) -> None:
        super(made, self).__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    given = {"__init__": __init__, "training_step": training_step, "log": lambda *_, **__: None, **members}
    made = type("Linear", (lit.Small,), given)
    return made


def noisy(batch: Any) -> Any:
    return batch[0] + torch.randn_like(batch[0]), batch[1]


def permuted(batch: Any) -> Any:  # as mixup does
    other = torch.randperm(len(batch[0]))
    return 0.7 * batch[0] + 0.3 * batch[0][other], batch[1]


DRAWS = {
    "after the transfer": {"on_after_batch_transfer": lambda self, batch, _: noisy(batch)},
    "before it": {"on_before_batch_transfer": lambda self, batch, _: noisy(batch)},
    "of other rows": {"on_after_batch_transfer": lambda self, batch, _: permuted(batch)},
    "in the collate function, and scaled": {
        "on_before_batch_transfer": lambda self, batch, _: (batch[0] * 0.1, batch[1]),
        "collate": lambda rows: noisy(torch.utils.data.default_collate(rows)),
    },
}


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("name", DRAWS)
def test_augmentations_are_not_taken_for_a_loss_that_does_not_add_up(lit, tmp_path, name, micro):
    members = dict(DRAWS[name])
    collate = members.pop("collate", None)
    module = fit(
        lit, tmp_path, linear(lit, **members), data=Vectors(), schedule=short(lit, 16),
        loader={"collate": collate, "micro_batch_size": micro},
    )  # fmt: skip
    assert float(module.seen) == 16 / micro  # the runs of the test are not left in buffers


def test_one_micro_batch_is_moved_at_a_time(lit, tmp_path):
    """Or memory would grow with the number of micro batches in a step."""
    seen = []

    class Order(lit.Learns):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append("move")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append("train")
            return self.loss(batch)

    schedule = lit.Thresholds(((0, 16),)).compile().until(samples=32)
    fit(lit, tmp_path, Order, schedule=schedule, loader={"weight": lambda batch: 1.0, "additive": False})
    assert seen == ["move", "train"] * 8


def test_a_hook_after_the_transfer_is_outside_of_autocast(lit, tmp_path):
    types = []

    class Hooked(lit.Small):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            types.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            return batch

    fit(lit, tmp_path, Hooked, schedule=short(lit, 8), precision="bf16-mixed")
    assert set(types) == {torch.float32}


def saves(folder: Any, **given: Any) -> list[Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return [ModelCheckpoint(folder, save_last=True, **given)]


@pytest.mark.parametrize(
    "every", [{"every_n_train_steps": 1}, {}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}]
)
@pytest.mark.parametrize("validated", [False, True])
def test_a_longer_schedule_continues_a_run_that_was_complete(lit, tmp_path, every, validated):
    validation = torch.utils.data.DataLoader(lit.rows(8), batch_size=4, collate_fn=lit.collate) if validated else None
    for end in (32, 64, 64):  # the third time it is complete, and nothing is trained
        module = fit(
            lit, tmp_path, lit.Learns, schedule=short(lit, end), validation=validation, enable_checkpointing=True,
            callbacks=saves(tmp_path, **every), ckpt_path="last" if end == 64 else None,
        )  # fmt: skip
        assert module.trainer.global_step == end // 8
    found = audit(tmp_path / "batchwright")
    assert (found.ok, found.samples, found.repeats) == (True, 64, 0)


def test_weights_alone_are_named_as_such(lit, tmp_path):
    module = fit(lit, tmp_path, lit.Learns, schedule=short(lit, 16))
    module.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(RunError, match=r"weights.ckpt has weights only \(save_weights_only\).*load_from_checkpoint"):
        fit(lit, tmp_path, lit.Learns, schedule=short(lit, 32), ckpt_path=str(tmp_path / "weights.ckpt"))


def test_a_scaler_may_skip_a_step(lit, tmp_path):
    """fp16 with a scaler of the CPU, which Lightning takes as a plugin."""
    from lightning.pytorch.plugins import MixedPrecision

    weights = []

    class Overflows(lit.Learns):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            weights.append(self.network[1].weight.detach().clone())

        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.network[1].weight.grad.fill_(torch.inf)

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    module = fit(
        lit, tmp_path, Overflows, schedule=short(lit, 32), plugins=plugin, enable_checkpointing=True,
        callbacks=saves(tmp_path, every_n_train_steps=4),
    )  # fmt: skip
    changed = [not torch.equal(a, b) for a, b in zip(weights, [*weights[1:], module.network[1].weight], strict=True)]
    assert changed == [True, False, True, True]
    found = audit(tmp_path / "batchwright")
    assert (found.ok, found.samples, found.skipped_samples) == (True, 32, 8)


def loader_of(lit: Any) -> Any:
    return torch.utils.data.DataLoader(lit.rows(32), batch_size=4, collate_fn=lit.collate)


def test_a_task_of_a_module_that_asks_its_trainer(lit):
    asked = []

    class Asks(lit.Learns):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + self.trainer.current_epoch)

        def configure_optimizers(self) -> Any:
            asked.append(self.trainer.estimated_stepping_batches)
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=asked[-1])
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    steps = lit.Steps(lit.rows(32), short(lit, 32), micro_batch_size=4, collate=lit.collate)
    for module, data, count in ((Asks(), loader_of(lit), 8), (lit.exact(Asks)(), steps, 4)):
        task = Task.from_lightning(module, data)
        report = batchwright.check(task, global_batch_size=8, micro_batch_sizes=(4,))
        assert report.ok is (data is steps)
        assert type(task.optimizer(task.build_model(0).parameters())) is torch.optim.AdamW and asked[-1] == count

    class Manual(lit.Learns):
        automatic_optimization = False

    for kind in (Manual, lit.exact(Manual)):
        with pytest.raises(ConfigError, match="automatic_optimization=False: must be True"):
            Task.from_lightning(kind(), loader_of(lit))


def test_check_weighs_a_model_that_shifts_labels_as_training_does(lit):
    needs("transformers")
    steps = lit.Steps(rows(32, 3, 32), short(lit, 32), micro_batch_size=4, collate=collate)
    task = Task.from_lightning(lit.exact(wrapped(lit, llama))(), steps)
    report = batchwright.check(task, global_batch_size=16, micro_batch_sizes=(2,))
    assert report.ok and not report.findings
