"""The same task, model and batch in TRL's GRPOTrainer: transformers' GPT-2 with the example's weights, a tokenizer made here.

Nothing is downloaded. `Recorded` is TRL's trainer; it also keeps the responses and the gradient of every update.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "grpo"))
import grpo
import task as example  # noqa: F401  (for tests and benchmarks)

NAMES = {  # a block's parameters: ours, transformers'
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with the example's ids."""
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(grpo.CHARACTERS)}, unk_token="="))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=".", pad_token=".", padding_side="left")


def names(policy: grpo.Policy) -> dict[str, str]:
    """Our name of each parameter -> its name in transformers' GPT-2."""
    found = {
        "token.weight": "transformer.wte.weight",
        "place.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    }
    for i in range(policy.shape.layers):
        for ours, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                found[f"blocks.{i}.{ours}.{kind}"] = f"transformer.h.{i}.{theirs}.{kind}"
    return found


def ours(policy: grpo.Policy, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of GPT-2 under our names; its Conv1D keeps matrices transposed."""
    layers = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    return {n: theirs[t].T if n.endswith(layers) else theirs[t] for n, t in names(policy).items()}


def gpt2(policy: grpo.Policy) -> GPT2LMHeadModel:
    """transformers' GPT-2 with the weights of `policy`."""
    shape = policy.shape
    config = GPT2Config(
        vocab_size=len(grpo.CHARACTERS),
        n_positions=shape.positions,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=grpo.END,
        eos_token_id=grpo.END,
        pad_token_id=grpo.END,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, value in ours(policy, dict(model.named_parameters())).items():
            value.copy_(policy.get_parameter(name))
    return model


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The example's reward, for TRL."""
    asked = torch.stack([grpo.encode(p) for p in prompts])
    tokens = torch.full(asked.shape, grpo.FILLER)
    for row, ids in enumerate(completion_ids):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return grpo.rewards(asked, tokens).tolist()


class Recorded(GRPOTrainer):
    """TRL's trainer; `micro_batches` and `gradients` are those of the updates so far, as TRL computed them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batches: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.add_callback(Gradients(self))

    def _compute_loss(self, model, inputs):
        self.micro_batches.append({k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor)})
        return super()._compute_loss(model, inputs)


class Gradients(TrainerCallback):
    def __init__(self, trainer: Recorded) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.trainer.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})


def trainer(
    kind: type[GRPOTrainer],
    policy: grpo.Policy,
    rows: list[Tensor],
    out: Path | str,
    *,
    prompts: int,
    generations: int,
    micro_responses: int,
    updates: int,
    **more: Any,
) -> GRPOTrainer:
    """TRL's trainer on `rows` in their order: one update per round of `prompts` × `generations` responses."""
    settings = {
        "per_device_train_batch_size": micro_responses,
        "gradient_accumulation_steps": prompts * generations // micro_responses,
        "num_generations": generations,
        "max_completion_length": len(rows[0]),
        "max_steps": updates,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 10**6,
        "disable_tqdm": True,
        "output_dir": str(out),
    }
    return kind(
        gpt2(policy),
        reward_funcs=reward,
        args=GRPOConfig(**settings | more),
        train_dataset=Dataset.from_dict({"prompt": [grpo.decode(row) for row in rows]}),
        processing_class=tokenizer(),
    )
