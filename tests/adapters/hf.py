"""Tiny models, data and trainers for the tests of `adapters/huggingface.py`; with an argument it trains on two ranks."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import batchwright
from batchwright.adapters.huggingface import exact

RAMP = batchwright.Thresholds([(0, 8), (16, 16)])
VOCABULARY = 32


def rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Sequences of 3 to 24 tokens; each row knows its number."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 25, (count,), generator=drawn).tolist()
    tokens = [torch.randint(1, VOCABULARY, (n,), generator=drawn).tolist() for n in lengths]
    return [{"input_ids": t, "labels": t[1:] + t[:1]} for t in tokens]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([list(row[name]) + [fill] * (longest - len(row[name])) for row in batch])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}


class Bare(nn.Module):
    """A model whose forward takes no further keywords: the Trainer divides by the number of micro batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Ignoring(Bare):
    """It takes keywords, and ignores `num_items_in_batch`: as BERT, RoBERTa, T5 and BART do."""

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, labels)


class Dividing(Ignoring):
    """Its loss divides by the number of labels in a way of its own: without labels, loss and gradient are NaN."""

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
        kept = (labels.flatten() != -100).to(each.dtype)
        return {"loss": (each * kept).sum() / kept.sum(), "logits": logits}


class Contrastive(Ignoring):
    """In-batch negatives: the loss of a row depends on the others in its micro batch."""

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        one, two = self.embedding(input_ids).mean(1), self.head(self.embedding(labels.clamp(min=0)).mean(1))[:, :8]
        return {"loss": F.cross_entropy(one @ two.T, torch.arange(len(one)))}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )


class OwnLoss(Trainer):
    """A user's class with a loss of its own: a mean."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs, labels=labels)["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


class Watch(TrainerCallback):
    """Keeps the gradient that reaches the optimizer in each step, and the ids of the step on this rank."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.ids: list[list[int]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        model = getattr(model, "module", model)
        self.gradients.append({n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None})
        group = getattr(self.trainer, "_Exact__group", None)
        if group is not None:
            self.ids.append([i for micro in group if not micro.filler for i in micro.ids.tolist()])


def arguments(out: Path | str, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(out), "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0,
            "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, **given,
        }
    )  # fmt: skip


def trained(kind: type, model: nn.Module, data: Any, args: TrainingArguments, resume: Any = None, **given: Any):
    """Train, and return the trainer and what was watched."""
    watch = Watch()
    made = kind(model, args=args, train_dataset=data, data_collator=collate, callbacks=[watch], **given)
    watch.trainer = made
    made.train(resume_from_checkpoint=resume)
    return made, watch


def half_way(out: Path, end: int, resume: bool = False):
    """The run of the tests of resume: 8 -> 16 samples per step, 64 samples, up to sample `end`."""
    torch.manual_seed(3)
    whole = RAMP.compile().until(64)
    schedule = whole if end == 64 else RAMP.compile().until(end)
    return trained(
        exact(Trainer), llama(), rows(64), arguments(out, save_strategy="steps", save_steps=1, lr_scheduler_type="constant"),
        resume=resume, schedule=schedule,
    )  # fmt: skip


def sft(out: Path, schedule: Any, kind: Any = None, **given: Any):
    """SFTTrainer on packed rows, exact unless `kind` is another class; not yet trained."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>"
    )
    config = SFTConfig(
        **{
            "output_dir": str(out), "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0,
            "learning_rate": 1e-9, "per_device_train_batch_size": 2, "save_strategy": "no", "packing": True,
            "max_length": 24, "logging_steps": 1, "bf16": False, "gradient_checkpointing": False, **given,
        }
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows(64)])
    watch = Watch()
    made = (kind or exact(SFTTrainer))(
        llama(), args=config, train_dataset=data, processing_class=tokenizer, callbacks=[watch],
        **({} if schedule is None else {"schedule": schedule}),
    )  # fmt: skip
    watch.trainer = made
    return made, watch


def sft_half_way(out: Path, end: int, resume: bool = False):
    """As `half_way`, with SFTTrainer: 4 -> 8 packed rows per step, 24 rows, up to row `end`."""
    torch.manual_seed(3)
    schedule = batchwright.Thresholds([(0, 4), (8, 8)]).compile().until(end)
    made, watch = sft(
        out, schedule, learning_rate=1e-2, lr_scheduler_type="constant", save_strategy="steps", save_steps=1
    )
    made.train(resume_from_checkpoint=resume)
    return made, watch


def trained_by(schedule: Any, out: Path, **given: Any) -> Any:
    """An exact Trainer with this schedule; not yet trained."""
    args = arguments(out, per_device_train_batch_size=1, **given)
    return exact(Trainer)(Bare(), args=args, train_dataset=rows(64), data_collator=collate, schedule=schedule)


class Grows(TrainerCallback):
    """What looks like a ramp: 2 micro batches, 4 after three steps, 8 after six. Keeps whether gradients differ by rank."""

    def __init__(self) -> None:
        self.apart: list[bool] = []

    def on_step_end(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = {3: 4, 6: 8}.get(state.global_step, args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        own = torch.cat([p.grad.flatten() for p in model.parameters()])
        every = [torch.empty_like(own) for _ in range(args.world_size)]
        torch.distributed.all_gather(every, own)
        self.apart.append(not torch.allclose(*every, rtol=0.01))


def compiled(folder: Path) -> None:
    """On each of two ranks: two steps of a compiled model."""
    torch.manual_seed(3)
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = arguments(folder, torch_compile=True, torch_compile_backend="aot_eager")
    made, watch = trained(exact(Trainer), model, rows(32), args, schedule=batchwright.Constant(16).compile().until(32))
    gradients = [{name.removeprefix("_orig_mod."): g for name, g in one.items()} for one in watch.gradients]
    found = {"model": before, "ids": watch.ids, "gradients": gradients}
    found["compiled"] = isinstance(made.model_wrapped, torch._dynamo.OptimizedModule)
    torch.save(found, folder / f"rank-{made.args.process_index}.pt")


def halves(folder: Path) -> None:
    """On each of two ranks: the first half of run `a`, the second half of `b`; of SFT the first of `s`, the second of `u`."""
    first, seen = half_way(folder / "a", 32)
    second, rest = half_way(folder / "b", 64, resume=True)
    torch.save({"ids": seen.ids[0], "gradient": seen.gradients[0]}, folder / f"gradient-{first.args.process_index}.pt")
    packed = sft_half_way(folder / "s", 16)[1] if find_spec("trl") else Watch()
    other = sft_half_way(folder / "u", 24, resume=True)[1] if find_spec("trl") else Watch()
    grows = Grows()
    args = arguments(folder / "stock", per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=8)
    Trainer(llama(), args=args, train_dataset=rows(128), data_collator=collate, callbacks=[grows]).train()
    found = {"a": seen.ids, "b": rest.ids, "s": packed.ids, "u": other.ids, "step": second.state.global_step}
    found |= {"apart": grows.apart, "loss": first.state.log_history[0]["loss"]}
    (folder / f"rank-{first.args.process_index}.json").write_text(json.dumps(found))
    try:
        trained_by(RAMP.compile().until(32), folder, fsdp="full_shard")
    except batchwright.PlanError as error:
        (folder / "refused").write_text(str(error))


if __name__ == "__main__":
    {"compiled": compiled, "halves": halves}[sys.argv[1]](Path(sys.argv[2]))
