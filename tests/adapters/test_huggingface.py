"""The adapter for transformers' Trainer: each test of the gradient fails with the Trainer alone."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import batchwright
from batchwright.adapters.course import UnderRun
from batchwright.cli.check import command as check
from batchwright.core.errors import ConfigError, PlanError, RunError
from batchwright.estimate.fake import FakeRuns
from batchwright.estimate.records import EstimateRequest
from batchwright.runtime import GlobalOrder, Ranks, Task, audit, load_task
from tests.needs import needs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def torchrun(what, folder):
    """A function of hf.py on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "-m", "tests.adapters.hf", what, folder],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip


def whole(model, batch):
    """The gradient of a batch in one piece, in float64."""
    model = copy.deepcopy(model).double().train()
    model.zero_grad()
    found = model(**batch)
    (found["loss"] if isinstance(found, dict) else found.loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(found, reference):
    difference = sum(float((found[name] - g).square().sum()) for name, g in reference.items())
    return (difference / sum(float(g.square().sum()) for g in reference.values())) ** 0.5


def bert(hf):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=hf.VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def classified(hf):
    return [{**row, "labels": [row["input_ids"][0] % 3]} for row in hf.rows(32)]


def one_label(hf):
    def collate(batch):
        made = hf.collate([{**row, "labels": row["input_ids"]} for row in batch])
        return {**made, "labels": torch.tensor([row["labels"][0] for row in batch])}

    return collate


CASES = {  # what the Trainer alone gives, at 8 micro batches of 4
    "Llama": (lambda hf: hf.llama(), None, (0.0, 1e-5)),
    "no keywords": (lambda hf: hf.Bare(), None, (0.01, 0.5)),
    "keywords ignored": (lambda hf: hf.Ignoring(), None, (6.5, 7.5)),
    "own compute_loss": (lambda hf: hf.Ignoring(), "OwnLoss", (6.5, 7.5)),
    "BERT": (bert, None, (6.9, 7.1)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_whole_batch(hf, tmp_path, case):
    from transformers import Trainer

    build, kind, (least, most) = CASES[case]
    kind = getattr(hf, kind) if kind else Trainer
    data, collate = (classified(hf), one_label(hf)) if case == "BERT" else (hf.rows(32), hf.collate)
    model = build(hf)
    reference = whole(model, collate(data))

    def gradient(kind, args, **given):
        watch = hf.Watch()
        copied = copy.deepcopy(model)
        kind(copied, args=args, train_dataset=data, data_collator=collate, callbacks=[watch], **given).train()
        (found,) = watch.gradients
        return error(found, reference)

    stock = gradient(kind, hf.arguments(tmp_path / "stock", gradient_accumulation_steps=8, max_steps=1))
    assert least <= stock <= most
    from batchwright.adapters.huggingface import exact

    ours = gradient(
        exact(kind), hf.arguments(tmp_path / "adapter"), schedule=batchwright.Constant(32).compile().until(32)
    )
    assert ours <= 1e-5


def test_every_step_of_a_ramp_with_ragged_batches_and_a_learning_rate_in_samples(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    data = hf.rows(60)
    schedule = batchwright.Thresholds([(0, 6), (12, 13)]).compile().until(60)
    model = hf.llama()
    args = hf.arguments(
        tmp_path, learning_rate=1e-9, lr_scheduler_type="linear", warmup_steps=2, eval_strategy="steps", eval_steps=2
    )
    trainer, watch = hf.trained(
        exact(Trainer), model, data, args, schedule=schedule, allow_ragged=True, eval_dataset=data[:8]
    )
    assert [len(ids) for ids in watch.ids] == [6, 6, 13, 13, 13, 9]
    assert sorted(i for ids in watch.ids for i in ids) == list(range(60))
    for ids, gradient in zip(watch.ids, watch.gradients, strict=True):
        assert error(gradient, whole(model, hf.collate([data[i] for i in ids]))) <= 1e-5
    history = trainer.state.log_history
    rates = [entry["learning_rate"] / 1e-9 for entry in history if "learning_rate" in entry]
    # Warm-up over the 12 samples of two steps, then linear to 0 at sample 60; each step uses the rate at its first sample.
    assert rates == pytest.approx([0, 0.5, 1, 35 / 48, 22 / 48, 9 / 48])
    assert [entry["epoch"] for entry in history if "loss" in entry] == pytest.approx(
        [p / 60 for p in (6, 12, 25, 38, 51, 60)]
    )
    assert sum("eval_loss" in entry for entry in history) == 3
    losses = [entry["loss"] for entry in history if "loss" in entry]
    first = hf.collate([data[i] for i in watch.ids[0]])
    assert losses[0] == pytest.approx(model(**first).loss.item(), rel=1e-4)
    found = audit(tmp_path)
    assert found.ok and found.unsaved_samples == 60  # nothing was saved


def test_packed_sequences_of_sft(hf, tmp_path):
    needs("trl")
    trainer, watch = hf.sft(tmp_path, batchwright.Thresholds([(0, 4), (8, 8)]).compile().until(24))
    packed = len(trainer.train_dataset)
    assert 24 <= packed < 64
    before = hf.llama()  # not a copy: SFTTrainer has changed the model's forward
    before.load_state_dict(trainer.model.state_dict())
    trainer.train()
    assert [len(ids) for ids in watch.ids] == [4, 4, 8, 8]
    for ids, gradient in zip(watch.ids, watch.gradients, strict=True):
        batch = trainer.data_collator([trainer.batchwright.dataset[i] for i in ids])
        # As SFTTrainer does: with a cache, a packed row would be one long sequence.
        assert error(gradient, whole(before, {**batch, "use_cache": False})) <= 1e-5
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    lengths = [len(row["input_ids"]) for row in trainer.batchwright.dataset]
    assert tokens[-1] == sum(lengths[i] for ids in watch.ids for i in ids)  # the test of the loss is not counted


def test_sft_with_a_loss_that_ignores_the_count(hf, tmp_path):
    """SFTTrainer computes its loss by itself, and alone it is right; in a class whose loss is a mean, it is not."""
    needs("trl")
    from trl import SFTTrainer

    from batchwright.adapters.huggingface import exact

    class Mean(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)

    errors = []
    for kind, schedule, accumulation in ((Mean, None, 4), (exact(Mean), batchwright.Constant(8).compile().until(8), 1)):
        trainer, watch = hf.sft(
            tmp_path / kind.__name__, schedule, kind, gradient_accumulation_steps=accumulation, max_steps=1,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        before = hf.llama()
        before.load_state_dict(trainer.model.state_dict())
        trainer.train()
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
        errors.append(error(watch.gradients[0], whole(before, {**batch, "use_cache": False})))
    assert 2.5 < errors[0] < 3.5  # 4 times the gradient
    assert errors[1] <= 1e-5


def test_micro_batches_without_a_label_do_not_make_weights_nan(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    data = [{**row, "labels": [-100] * len(row["labels"])} if i % 3 else row for i, row in enumerate(hf.rows(32))]
    model = hf.Dividing()
    reference = whole(model, hf.collate(data))
    args = hf.arguments(tmp_path, per_device_train_batch_size=1)
    trainer, watch = hf.trained(
        exact(Trainer), model, data, args, schedule=batchwright.Constant(32).compile().until(32)
    )
    assert error(watch.gradients[0], reference) <= 1e-5
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_step_without_a_label_is_an_error_whose_advice_can_be_followed(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    data, schedule = hf.rows(24), batchwright.Constant(8).compile().until(24)
    order = GlobalOrder(24, seed=42)  # the Trainer's seed
    empty = order.ids(range(8, 16)).tolist()
    masked = [{**row, "labels": [-100] * len(row["labels"])} if i in empty else row for i, row in enumerate(data)]

    def train(rows, resume):
        args = hf.arguments(tmp_path, save_strategy="steps", save_steps=1)
        return hf.trained(exact(Trainer), hf.llama(), rows, args, resume=resume, schedule=schedule)

    with pytest.raises(RunError, match=rf"step 1 has no gradient.* indices in the dataset are {empty[0]}, {empty[1]}"):
        train(masked, None)
    masked[empty[3]] = data[empty[3]]  # as the error says
    trainer, watch = train(masked, True)
    assert watch.ids == [empty, order.ids(range(16, 24)).tolist()] and trainer.batchwright.done
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 24, 0, 0)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_scaler_may_skip_a_step(hf, tmp_path, optim):
    """fp16 has a scaler on an accelerator only; here accelerate gets one for the CPU. Fused, the optimizer skips by itself."""
    from transformers import Trainer, TrainerCallback

    from batchwright.adapters.huggingface import exact

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                next(model.parameters()).grad.fill_(torch.inf)
            weights.append(model.state_dict()["lm_head.weight"].clone())

    weights, watch, model, data = [], hf.Watch(), hf.llama(), hf.rows(32)
    args = hf.arguments(
        tmp_path, lr_scheduler_type="linear", learning_rate=1e-3, optim=optim, save_strategy="steps", save_steps=4
    )
    trainer = exact(Trainer)(
        model, args=args, train_dataset=data, data_collator=hf.collate, callbacks=[watch, Overflow()],
        schedule=batchwright.Constant(8).compile().until(32),
    )  # fmt: skip
    watch.trainer = trainer
    before = copy.deepcopy(model)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    first = {name: gradient / 1024 for name, gradient in watch.gradients[0].items()}
    assert error(first, whole(before, hf.collate([data[i] for i in watch.ids[0]]))) <= 1e-5
    assert [torch.equal(one, two) for one, two in itertools.pairwise(weights)] == [False, True, False]
    ledger = (tmp_path / "ledger" / "launch-00000-rank-00000.jsonl").read_text().splitlines()
    assert [json.loads(line).get("outcome", "applied") for line in ledger[1:]] == ["applied", "skipped", "applied"]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])  # by samples: a skipped step counts
    found = audit(tmp_path)
    assert (found.ok, found.skipped_samples, trainer.batchwright.position) == (True, 8, 32)


@pytest.mark.rounds
def test_a_compiled_model_gives_the_same_gradient_on_two_ranks(hf, tmp_path):
    done = torchrun("compiled", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    data, model = hf.rows(32), hf.llama()
    ranks = [torch.load(tmp_path / f"rank-{r}.pt") for r in (0, 1)]
    model.load_state_dict(ranks[0]["model"])
    reference = whole(model, hf.collate([data[i] for rank in ranks for i in rank["ids"][0]]))
    for rank in ranks:
        assert rank["compiled"] and error(rank["gradients"][0], reference) <= 1e-5


def refused_by(hf, out, edit=lambda args: None, kind=None, schedule=None, model=None, **given):
    """The names of all that is refused; the trainer is made, and not trained."""
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    args = hf.arguments(out, **given)
    edit(args)
    schedule = schedule or batchwright.Constant(8).compile().until(32)
    with pytest.raises(PlanError) as refused:
        exact(kind or Trainer)(
            model or hf.Bare(), args=args, train_dataset=hf.rows(32), data_collator=hf.collate, eval_dataset=hf.rows(8),
            schedule=schedule,
        )  # fmt: skip
    assert all(f"{one.field}=" in str(refused.value) for one in refused.value.violations)
    return [one.field for one in refused.value.violations]


ARGUMENTS = {  # what is refused by its name and value alone
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "group_by_length",
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "save_only_model": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "ddp_static_graph": True,
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "logging_strategy": "epoch",
    "optim": "lomo",
    "lr_scheduler_kwargs": {"num_decay_steps": 4},
    "lr_scheduler_type": "inverse_sqrt",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused_by_name(hf, tmp_path, name):
    assert refused_by(hf, tmp_path, **{name: ARGUMENTS[name]}) == [name]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_not_uploaded_before_they_are_complete(hf, tmp_path, strategy):
    def push(args):  # as an argument, it would ask the Hub for a token when the Trainer is made
        args.push_to_hub, args.hub_strategy = True, strategy

    from transformers import Trainer

    class Offline(Trainer):
        def init_hf_repo(self, token=None):
            pass

    assert refused_by(hf, tmp_path, push, kind=Offline) == ["hub_strategy"]


def test_optimizers_that_update_during_backward_are_refused(hf, tmp_path):
    for optim in ("adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"):
        assert refused_by(hf, tmp_path, optim=optim) == ["optim"]


def test_several_gpus_in_one_process_are_refused(hf, tmp_path):
    """There is none on this machine: the number is set after it was read."""

    def two(args):
        assert args.n_gpu == 0  # reads the devices of the machine, once
        args._n_gpu = 2

    assert refused_by(hf, tmp_path, two) == ["n_gpu"]


def test_parallelism_is_refused(hf, tmp_path):
    from accelerate import ParallelismConfig
    from transformers import Trainer

    assert refused_by(hf, tmp_path, parallelism_config=ParallelismConfig()) == ["parallelism_config"]

    class DeepSpeed(Trainer):  # the package is not installed, and both refuse to start without it
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True

    assert refused_by(hf, tmp_path, kind=DeepSpeed) == ["deepspeed"]

    class Sharded(hf.Bare):  # as transformers marks a model that it has sharded while loading it
        is_distributed_loading_by_transformers = True

    assert refused_by(hf, tmp_path, model=Sharded()) == ["fsdp"]


def test_grpo_is_refused(hf, tmp_path):
    """It decides by itself which samples are trained when."""
    needs("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from batchwright.adapters.huggingface import exact

    made, _ = hf.sft(tmp_path / "tokenizer", batchwright.Constant(4).compile().until(24))
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=4, num_generations=2, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"trainer=get_train_dataloader.*is defined by this Trainer class"):
        exact(GRPOTrainer)(
            hf.llama(), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
            train_dataset=Dataset.from_list([{"prompt": "w1"}] * 8), processing_class=made.processing_class,
            schedule=batchwright.Constant(4).compile().until(8),
        )  # fmt: skip


def test_a_trainer_that_generates_its_batches_is_refused_by_name(hf, tmp_path, monkeypatch):
    """TRL's GKDTrainer: each of its switches before training, and what it generates in any case."""
    needs("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from tokenizers.pre_tokenizers import Whitespace
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from batchwright.adapters.huggingface import exact

    tokens = hf.sft(tmp_path / "tokenizer", batchwright.Constant(4).compile().until(24))[0].processing_class
    tokens.backend_tokenizer.pre_tokenizer = Whitespace()
    tokens.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]

    def made(**given):
        args = GKDConfig(
            str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=4, bf16=False, save_strategy="no",
            gradient_checkpointing=False, max_new_tokens=9, disable_tqdm=True, **given,
        )  # fmt: skip
        return exact(GKDTrainer)(
            hf.llama(), teacher_model=hf.llama(), args=args, train_dataset=Dataset.from_list([{"messages": talk}] * 8),
            processing_class=tokens, schedule=batchwright.Constant(4).compile().until(8),
        )  # fmt: skip

    with pytest.raises(PlanError, match=r"trainer=lmbda, seq_kd: must be 0: ExactGKDTrainer replaces batches"):
        made(lmbda=0.5, seq_kd=True)
    trainer = made(lmbda=0.0, seq_kd=False)
    trainer.train()  # as it is without generation
    assert trainer.batchwright.position == 8
    trainer.lmbda = 1.0
    trainer.batchwright.close()
    with pytest.raises(PlanError, match="trainer=lmbda"):
        trainer.train()


def test_a_training_step_that_changes_the_batch_or_the_loss_is_refused(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    class Copies(Trainer):
        """The same data in other tensors: as moving them to a device does."""

        def training_step(self, model, inputs, *given):
            return super().training_step(model, {name: value.clone() for name, value in inputs.items()}, *given)

    class Changes(Trainer):
        def training_step(self, model, inputs, *given):
            inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == inputs["labels"].max(), -100)
            return super().training_step(model, inputs, *given)

    class Alone(Trainer):
        def training_step(self, model, inputs, *given):
            loss = model(**inputs)["loss"]
            self.accelerator.backward(loss)
            return loss.detach()

    def trained(kind):
        schedule = batchwright.Constant(8).compile().until(16)
        args = hf.arguments(tmp_path / kind.__name__)
        return hf.trained(exact(kind), hf.Bare(), hf.rows(16), args, schedule=schedule)[0]

    assert trained(Copies).batchwright.position == 16
    with pytest.raises(RunError, match=r"training_step of Changes changes the batch: its weight was \d+, and is \d+"):
        trained(Changes)
    with pytest.raises(RunError, match="training_step of Alone does not call compute_loss"):
        trained(Alone)


def test_a_training_step_may_take_members_out_of_its_batch(hf, tmp_path):
    """Also where one batch stands in for others, which have no label."""
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    class Pops(Trainer):
        def training_step(self, model, inputs, *given):
            inputs.pop("attention_mask")
            return super().training_step(model, inputs, *given)

    data = [{**row, "labels": [-100] * len(row["labels"])} if i % 3 else row for i, row in enumerate(hf.rows(32))]
    args, schedule = hf.arguments(tmp_path, per_device_train_batch_size=1), batchwright.Constant(16).compile().until(32)
    assert hf.trained(exact(Pops), hf.Bare(), data, args, schedule=schedule)[0].batchwright.done


def test_callbacks_of_the_user_see_the_new_position_and_cannot_take_back_a_stop(hf, tmp_path):
    from transformers import Trainer, TrainerCallback

    from batchwright.adapters.huggingface import exact

    seen = []

    class Sees(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((trainer.batchwright.position, state.epoch))
            control.should_training_stop = False

    trainer = exact(Trainer)(
        hf.Bare(), args=hf.arguments(tmp_path), train_dataset=hf.rows(64), data_collator=hf.collate, callbacks=[Sees()],
        schedule=batchwright.Constant(8).compile().until(64),
    )  # fmt: skip
    trainer.batchwright._stop.set()  # as the signal of a run
    trainer.train()
    assert seen == [(8, 8 / 64)]


def test_exact_takes_a_class_of_trainers(hf):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    assert exact(exact(Trainer)) is exact(Trainer)
    for wrong, name in ((hf.Bare, "Bare"), (Trainer.__new__(Trainer), "Trainer(…)")):
        with pytest.raises(ConfigError, match=re.escape(f"exact({name}): must be a class of transformers.Trainer")):
            exact(wrong)


def test_what_stops_early_is_refused_under_run(hf, tmp_path):
    """`run` would start the launch again, and its callback would count from 0 again."""
    from transformers import EarlyStoppingCallback, Trainer

    from batchwright.adapters.huggingface import exact

    batchwright.run(
        ["true"], thresholds="0:8", samples=32, micro_batch_size=4, devices=1, dir=tmp_path / "run", progress=False,
        max_retries=0,
    )  # fmt: skip
    given = {
        "args": hf.arguments(tmp_path, eval_strategy="steps", metric_for_best_model="loss"),
        "train_dataset": hf.rows(32), "eval_dataset": hf.rows(8), "data_collator": hf.collate,
    }  # fmt: skip
    schedule = batchwright.Constant(8).compile().until(32)
    assert exact(Trainer)(hf.Bare(), callbacks=[EarlyStoppingCallback(1)], schedule=schedule, **given)
    with pytest.MonkeyPatch.context() as patched:
        run = UnderRun(tmp_path / "run", 7, tmp_path / "status.json", 0, 32)
        patched.setattr("batchwright.adapters.huggingface.under_run", lambda: run)
        with pytest.raises(PlanError, match="callbacks=EarlyStoppingCallback: must not be used under batchwright run"):
            exact(Trainer)(hf.Bare(), callbacks=[EarlyStoppingCallback(1)], **given)
        trainer = exact(Trainer)(hf.Bare(), **given)
        trainer.add_callback(EarlyStoppingCallback(1))  # later
        with pytest.raises(PlanError, match="callbacks=EarlyStoppingCallback"):
            trainer.train()


def test_what_cannot_be_exact_is_refused_all_at_once(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    class Own(Trainer):
        def get_train_dataloader(self):
            return []

    schedule = batchwright.Constant(8).compile().until(32)

    def made(kind=Trainer, data=None, schedule=schedule, eval_dataset=None, **given):
        args = hf.arguments(tmp_path, **given)
        return exact(kind)(
            hf.Bare(),
            args=args,
            train_dataset=hf.rows(32) if data is None else data,
            data_collator=hf.collate,
            schedule=schedule,
            eval_dataset=eval_dataset,
        )

    with pytest.raises(PlanError) as refused:
        made(
            Own, gradient_accumulation_steps=4, train_sampling_strategy="group_by_length", auto_find_batch_size=True,
            save_strategy="epoch", dataloader_drop_last=True, save_only_model=True, optim="adalomo",
            lr_scheduler_kwargs={"num_decay_steps": 4},
        )  # fmt: skip
    fields = {violation.field for violation in refused.value.violations}
    assert fields == {
        "gradient_accumulation_steps", "train_sampling_strategy", "auto_find_batch_size", "save_strategy", "optim",
        "dataloader_drop_last", "save_only_model", "lr_scheduler_kwargs", "trainer",
    }  # fmt: skip

    def refused_fields(**given):
        with pytest.raises(PlanError) as refused:
            made(**given)
        return [violation.field for violation in refused.value.violations]

    class Above(exact(Trainer)):  # it would stand before the adapter
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)

        def create_scheduler(self, num_training_steps, optimizer=None):
            return None

    with pytest.raises(PlanError, match=r"compute_loss, create_scheduler: replaces .* exact\(Mine\)"):
        Above(hf.Bare(), args=hf.arguments(tmp_path), train_dataset=hf.rows(32), schedule=schedule)
    assert refused_fields(lr_scheduler_type="inverse_sqrt", lr_scheduler_kwargs={"timescale": 9}, save_on_each_node=True) == [
        "save_on_each_node", "lr_scheduler_kwargs", "lr_scheduler_type",
    ]  # fmt: skip
    assert made(lr_scheduler_type="inverse_sqrt", warmup_steps=2).batchwright.course.steps == 4
    assert refused_fields(save_total_limit=1, metric_for_best_model="loss") == ["save_total_limit"]
    best = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "metric_for_best_model": "loss",
        "eval_dataset": hf.rows(8),
    }
    assert made(**best)
    with pytest.MonkeyPatch.context() as patched:
        run = UnderRun(tmp_path, 0, tmp_path / "status.json", 0, 32)
        patched.setattr("batchwright.adapters.huggingface.under_run", lambda: run)
        assert refused_fields(**best) == ["save_strategy"]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(hf.rows(4))

    with pytest.raises(PlanError, match="map-style"):
        made(data=Stream(), max_steps=4)
    with pytest.MonkeyPatch.context() as patched:  # torchrun started two, and accelerate sees one
        patched.setattr("batchwright.adapters.huggingface.discover", lambda: Ranks(rank=0, size=2))
        with pytest.raises(PlanError, match="started 2 processes, which would train alone"):
            made()
    with pytest.raises(PlanError, match="max_steps=3, but the schedule ends after 4 steps"):
        made(max_steps=3)
    with pytest.raises(PlanError, match="whole number of accumulation steps"):
        made(schedule=batchwright.Constant(10).compile().until(30))
    # A schedule without an end ends where the arguments say, as with the Trainer.
    assert made(schedule=batchwright.Constant(8), max_steps=3).batchwright.course.samples == 24
    assert made(schedule=batchwright.Constant(8), num_train_epochs=2).batchwright.course.samples == 64
    plan = batchwright.plan(global_batch_size=16, micro_batch_size=2, devices=1)
    planned = made(schedule=plan, num_train_epochs=1)
    assert (planned.args.per_device_train_batch_size, planned.batchwright.course.steps) == (2, 2)


def test_a_loss_that_does_not_add_up_is_refused_and_a_router_is_named(hf, tmp_path, caplog):
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer

    from batchwright.adapters.huggingface import exact

    schedule = batchwright.Constant(8).compile().until(16)
    with pytest.raises(RunError, match="in-batch negatives"):
        hf.trained(exact(Trainer), hf.Contrastive(), hf.rows(16), hf.arguments(tmp_path / "c"), schedule=schedule)
    config = MixtralConfig(
        vocab_size=hf.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1000 if ".gate." in name else 1)  # a router that has decided
    with caplog.at_level("WARNING", logger="batchwright.adapters"):
        trainer, _ = hf.trained(exact(Trainer), model, hf.rows(16), hf.arguments(tmp_path / "m"), schedule=schedule)
    assert trainer.batchwright.position == 16
    assert any("balance loss" in record.message for record in caplog.records)


def test_a_wrong_weight_is_refused_and_a_collator_that_draws_is_not(hf, tmp_path, caplog):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    given = {"schedule": batchwright.Constant(8).compile().until(16), "args": hf.arguments(tmp_path)}
    with pytest.raises(RunError, match="its gradient"):
        # Every token's loss is near log 32: the loss alone would not show that it is no mean over rows.
        hf.trained(exact(Trainer), hf.llama(), hf.rows(16), weight=lambda batch: len(batch["labels"]), **given)

    def masked(rows):
        made = hf.collate(rows)
        drawn = torch.rand(made["labels"].shape) < 0.5
        return {**made, "labels": made["labels"].masked_fill(drawn, -100)}

    trainer = exact(Trainer)(hf.llama(), train_dataset=hf.rows(16), data_collator=masked, **given)
    with caplog.at_level("WARNING", logger="batchwright.adapters"):
        trainer.train()
    assert trainer.batchwright.position == 16 and not caplog.records
    given["args"] = hf.arguments(tmp_path, per_device_train_batch_size=1)
    with pytest.raises(RunError, match="its gradient"):  # single samples: one is compared together with the next
        hf.trained(exact(Trainer), hf.llama(), hf.rows(16), weight=lambda batch: len(batch["labels"]), **given)


def test_rounding_hides_a_weight_that_is_nearly_right(hf, tmp_path, mixed):
    """In half precision. `check` sees it: it computes in float64."""
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    given = {"schedule": batchwright.Constant(8).compile().until(16), "args": hf.arguments(tmp_path, bf16=True)}
    with pytest.raises(RunError, match="its gradient"):
        hf.trained(exact(Trainer), hf.llama(), hf.rows(16), weight=lambda batch: len(batch["labels"]), **given)

    def near(batch):  # the first label of each row does not count
        return (batch["labels"] != -100).sum()

    trainer, _ = hf.trained(exact(Trainer), hf.llama(), hf.rows(16), weight=near, **given)
    assert trainer.batchwright.position == 16
    fresh = exact(Trainer)(hf.llama(), train_dataset=hf.rows(16), data_collator=hf.collate, weight=near, **given)
    report = batchwright.check(Task.from_trainer(fresh), global_batch_size=16, micro_batch_sizes=(2,))
    assert not report.ok


def test_a_scheduler_of_the_class_counts_steps(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    class OneCycle(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, num_training_steps)
            return self.lr_scheduler

    schedule = hf.RAMP.compile().until(64)  # 5 steps
    trainer, _ = hf.trained(exact(OneCycle), hf.Bare(), hf.rows(64), hf.arguments(tmp_path), schedule=schedule)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2 * (1 - step / 5) for step in range(5)])


def test_an_interrupted_save_does_not_count(hf, tmp_path):
    hf.half_way(tmp_path, 32)
    newest = tmp_path / "checkpoint-3"
    (newest / "batchwright.json").unlink()  # killed before the save was complete
    with pytest.raises(RunError, match="is not a complete checkpoint"):
        hf.half_way(tmp_path, 64, resume=str(newest))
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    found, watch = hf.half_way(tmp_path, 64, resume=True)
    assert [len(ids) for ids in watch.ids] == [16, 16, 16] and found.state.global_step == 5
    result = audit(tmp_path)
    assert (result.ok, result.samples, result.discarded_samples) == (True, 64, 16)
    stored = json.loads(state.read_text())["stateful_callbacks"]["batchwright"]["attributes"]
    assert (stored["position"], stored["step"]) == (16, 2)
    # Weights of one save with the position of another are refused.
    state.write_text(state.read_text().replace('"position": 16', '"position": 32'))  # of the same size
    with pytest.raises(RunError, match="position 32, batchwright"):
        hf.half_way(tmp_path, 64, resume=str(state.parent))


def test_a_resume_names_the_checkpoints_that_it_cannot_continue(hf, tmp_path, caplog):
    from transformers import Trainer, TrainerCallback

    from batchwright.adapters.huggingface import exact

    class Removes(TrainerCallback):  # a file of each checkpoint, when it is complete
        def on_save(self, args, state, control, **kwargs):
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "training_args.bin").unlink()

    def train(out, end, resume, callbacks=(), kind=None, **given):
        args = hf.arguments(out, save_strategy="steps", save_steps=1, **given)
        made = (kind or exact(Trainer))(
            hf.Bare(), args=args, train_dataset=hf.rows(64), data_collator=hf.collate, callbacks=list(callbacks),
            **({} if kind else {"schedule": batchwright.Constant(8).compile().until(end)}),
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return made

    train(tmp_path / "stock", 0, None, kind=Trainer, max_steps=2)
    before = (tmp_path / "stock" / "checkpoint-1" / "trainer_state.json").read_bytes()
    with pytest.raises(
        RunError, match=r"no checkpoint in .*stock can .* checkpoint-1: it has no batchwright.json.*checkpoint-2"
    ):
        train(tmp_path / "stock", 64, True)
    assert (tmp_path / "stock" / "checkpoint-1" / "trainer_state.json").read_bytes() == before
    train(tmp_path / "cut", 16, None, callbacks=[Removes()])
    with pytest.raises(
        RunError, match=r"checkpoint-1: training_args.bin is missing; checkpoint-2: training_args.bin is miss"
    ):
        train(tmp_path / "cut", 64, True)
    train(tmp_path / "half", 24, None)
    with (tmp_path / "half" / "checkpoint-3" / "training_args.bin").open("ab") as file:
        file.write(b"1")
    with caplog.at_level("WARNING", logger="batchwright.adapters"):
        made = train(tmp_path / "half", 32, True)
    assert made.batchwright.done and made.state.global_step == 4
    (told,) = [record.message for record in caplog.records]
    assert re.search(
        r"continues from checkpoint-2. Not complete: checkpoint-3: training_args.bin has \d+ bytes, and had", told
    )
    # An interrupted first save of our own is no reason to stop.
    (tmp_path / "first" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "first" / "checkpoint-1" / "batchwright.json").write_text('{"schema": 1, "files": null}')
    assert train(tmp_path / "first", 16, True).batchwright.done


def test_a_longer_schedule_continues_at_its_own_learning_rate(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    args = hf.arguments(tmp_path, save_strategy="steps", save_steps=4, lr_scheduler_type="linear", learning_rate=1.0)
    for end in (32, 64):
        schedule = batchwright.Constant(8).compile().until(end)
        trainer, _ = hf.trained(exact(Trainer), hf.Bare(), hf.rows(64), args, resume=end == 64, schedule=schedule)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_a_resume_draws_the_same_dropout_and_a_complete_run_stays_as_it_is(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    class Drops(hf.Bare):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Sequential(self.embedding, torch.nn.Dropout(0.5))

    def train(out, end, resume=None):
        torch.manual_seed(3)
        args = hf.arguments(out, save_strategy="steps", save_steps=1, lr_scheduler_type="constant")
        schedule = hf.RAMP.compile().until(end)
        return hf.trained(exact(Trainer), Drops(), hf.rows(64), args, resume=resume, schedule=schedule)

    whole, _ = train(tmp_path / "whole", 64)
    train(tmp_path / "parts", 32)
    again, watch = train(tmp_path / "parts", 64, resume=True)
    assert len(watch.ids) == 2
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    complete, watch = train(tmp_path / "parts", 64, resume=True)
    assert (watch.ids, complete.state.global_step, complete.batchwright.position) == ([], 5, 64)
    assert all(map(torch.equal, complete.model.parameters(), again.model.parameters()))
    found = audit(tmp_path / "parts")
    assert (found.ok, found.samples, found.repeats) == (True, 64, 0)


def test_the_speed_of_a_part_of_a_ramp(hf, tmp_path):
    """The Trainer shares the samples of the whole run by steps, and the steps of a ramp differ."""
    from transformers import Trainer, TrainerCallback

    from batchwright.adapters.huggingface import exact

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    schedule = batchwright.Thresholds([(0, 8), (16, 64)]).compile().until(144)
    args = hf.arguments(tmp_path)
    trainer = exact(Trainer)(
        hf.Bare(), args=args, train_dataset=hf.rows(144), data_collator=hf.collate, callbacks=[Stop()], schedule=schedule
    )  # fmt: skip
    found = trainer.train().metrics
    assert found["train_samples_per_second"] / found["train_steps_per_second"] == pytest.approx(8, rel=0.02)  # rounded


@pytest.fixture(scope="module")
def resumed(hf, tmp_path_factory):
    """Run `a`: two ranks, then one. Run `b`: one rank, then two. Run `c`: one rank, never stopped. `s` and `u`: SFT."""
    folder = tmp_path_factory.mktemp("resume")
    alone, all_ids = hf.half_way(folder / "c", 64)
    _, first = hf.half_way(folder / "b", 32)
    if find_spec("trl"):
        hf.sft_half_way(folder / "u", 16)
    done = torchrun("halves", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in (0, 1)]
    last, rest = hf.half_way(folder / "a", 64, resume=True)
    return folder, alone, all_ids.ids, first.ids, ranks, last, rest.ids


def test_a_resume_on_another_number_of_ranks_has_equal_ids_and_weights(resumed):
    folder, alone, expected, first, ranks, last, rest = resumed
    joined = {name: [[*one, *two] for one, two in zip(*(r[name] for r in ranks), strict=True)] for name in ("a", "b")}
    assert joined["a"] + rest == expected
    assert first + joined["b"] == expected
    for name in ("a", "b", "c"):
        found = audit(folder / name)
        assert (found.ok, found.samples, found.gaps, found.repeats, found.discarded_samples) == (True, 64, 0, 0, 0)
    from safetensors.torch import load_file

    reference = {name: p.detach() for name, p in alone.model.named_parameters()}
    for weights in (
        load_file(folder / "b" / "checkpoint-5" / "model.safetensors"),
        dict(last.model.named_parameters()),
    ):
        for name, p in reference.items():
            if name in weights:
                assert torch.allclose(weights[name], p, atol=2e-5)


def test_two_ranks_have_the_gradient_of_the_whole_batch(hf, resumed):
    folder, data = resumed[0], hf.rows(64)
    found = [torch.load(folder / f"gradient-{rank}.pt") for rank in (0, 1)]
    torch.manual_seed(3)
    reference = whole(hf.llama(), hf.collate([data[i] for one in found for i in one["ids"]]))
    for one in found:
        assert error(one["gradient"], reference) <= 1e-5
    torch.manual_seed(3)
    loss = hf.llama()(**hf.collate([data[i] for one in found for i in one["ids"]])).loss.item()
    assert [rank["loss"] for rank in resumed[4]] == [pytest.approx(loss, rel=1e-4)] * 2  # as it is logged


def test_a_ramp_by_a_callback_leaves_ranks_apart(resumed):
    """As docs/huggingface.md says of the Trainer alone: 5 of 8 steps are not synchronised."""
    assert [rank["apart"] for rank in resumed[4]] == [[False] * 3 + [True] * 5] * 2


def test_fsdp_is_refused(resumed):
    """As an argument, under torchrun; without a launcher the Trainer itself refuses it."""
    told = (resumed[0] / "refused").read_text()
    assert told.startswith("fsdp=True: was not tested, and is refused")


def test_sft_resumes_on_another_number_of_ranks(hf, resumed):
    needs("trl")
    folder, ranks = resumed[0], resumed[4]
    last, rest = hf.sft_half_way(folder / "s", 24, resume=True)
    alone, expected = hf.sft_half_way(folder / "t", 24)
    joined = {name: [[*one, *two] for one, two in zip(*(r[name] for r in ranks), strict=True)] for name in ("s", "u")}
    assert joined["s"] + rest.ids == expected.ids and [len(ids) for ids in expected.ids] == [4, 4, 8, 8]
    assert expected.ids[:3] + joined["u"] == expected.ids  # 1 -> 2
    for run in ("s", "u"):
        shown = CliRunner().invoke(check, ["--ledger", str(folder / run), "--json"], catch_exceptions=False)
        found = json.loads(shown.stdout)
        assert shown.exit_code == 0, shown.output
        assert [found[name] for name in ("samples", "gaps", "repeats", "discarded_samples")] == [24, 0, 0, 0]
    from safetensors.torch import load_file

    stored = load_file(folder / "u" / "checkpoint-4" / "model.safetensors")
    for name, p in alone.model.named_parameters():
        assert torch.allclose(dict(last.model.named_parameters())[name], p, atol=2e-5)
        assert name not in stored or torch.allclose(stored[name], p, atol=2e-5)


def test_check_names_what_the_trainer_does(hf, tmp_path):
    from transformers import Trainer

    from batchwright.adapters.huggingface import exact

    def causes(kind, model, **given):
        args = hf.arguments(tmp_path, gradient_accumulation_steps=1 if given else 8)
        trainer = kind(model, args=args, train_dataset=hf.rows(32), data_collator=hf.collate, **given)
        report = batchwright.check(Task.from_trainer(trainer), global_batch_size=16, micro_batch_sizes=(2,))
        return report.ok, [finding.cause for finding in report.findings], report

    schedule = batchwright.Constant(16).compile().until(16)
    ok, found, report = causes(Trainer, hf.Ignoring())
    assert (ok, found[0]) == (False, "ignores-num-items-in-batch") and "exact(Trainer)" in report.findings[0].message
    assert report.splits[0].relative_error == pytest.approx(7, rel=0.2)
    assert causes(Trainer, hf.Bare())[:2] == (False, ["mean-of-means"])
    assert causes(hf.OwnLoss, hf.Ignoring())[1][0] == "ignores-num-items-in-batch"
    assert causes(Trainer, hf.llama())[0]
    for model in (hf.Ignoring(), hf.Bare(), hf.llama()):
        assert causes(exact(Trainer), model, schedule=schedule)[:2] == (True, [])


def test_a_function_that_returns_a_trainer_is_a_task(hf, tmp_path):
    task = load_task(f"{ROOT / 'examples/huggingface/train.py'}:trainer", {"stock": True, "out": str(tmp_path)})
    assert (task.framework, len(task.dataset) > 1000) == ("transformers", True)
    loss, weight = task.loss(task.build_model(0), task.collate([task.dataset[0], task.dataset[1]]))
    assert weight == 2 * 63 and loss.item() / weight == pytest.approx(5.5, rel=0.1)  # log(256) per byte
    assert len(task.optimizer(task.build_model(0).parameters()).param_groups) == 1


def test_probe_and_estimate_take_a_function_that_returns_a_trainer(hf, tmp_path):
    """Both for real: trials in processes of their own with a limit of memory, and the estimate on fake tensors."""
    target, arguments = f"{ROOT / 'examples/huggingface/train.py'}:trainer", {"out": str(tmp_path)}
    found = batchwright.probe(target, args=arguments, memory="600MiB", max=8, throughput=False, dir=None)
    assert found.max_micro_batch_size == 8 and found.first_failing_micro_batch_size is None
    assert found.trials and all(trial.fits for trial in found.trials)
    # A plan or a ramp with the sizes that were measured fills the arguments, as docs/huggingface.md says.
    plan = batchwright.plan(global_batch_size=32, devices=1, max_micro_batch_size=found.max_micro_batch_size)
    ramp = batchwright.ramp(
        thresholds="0:8 64:32", samples=128, devices=1, max_micro_batch_size=found.max_micro_batch_size
    )
    for schedule, steps in ((plan, 4), (ramp, 10)):
        filled = hf.trained_by(schedule, tmp_path, max_steps=4 if schedule is plan else -1)
        assert (filled.args.per_device_train_batch_size, filled.args.gradient_accumulation_steps) == (8, 1)
        assert filled.batchwright.course.steps == steps
    point = FakeRuns(EstimateRequest(target, args={**arguments, "stock": True})).point(8)
    parameters = sum(p.numel() for p in load_task(target, arguments).build_model(0).parameters())
    assert point.breakdown["parameters"] == 4 * parameters
    assert 8 * parameters <= point.breakdown["optimizer"] < 8.1 * parameters  # two moments, and the counters of steps
    assert not list(tmp_path.iterdir())  # nothing was trained
