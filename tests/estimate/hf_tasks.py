"""Tasks with the libraries that people fine-tune with: transformers, peft, bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchwright.runtime.task import Task

SMALL: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    use_cache=False,
)


def optimizers(name: str) -> Any:
    adam: dict[str, dict[str, Any]] = {"adamw": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}
    if name in adam:
        return lambda params: torch.optim.AdamW(params, **adam[name])
    if name == "sgd":
        return lambda params: torch.optim.SGD(params, momentum=0.9)
    if name == "adafactor":
        return torch.optim.Adafactor
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit


def trainable(name: str) -> Any:
    make = optimizers(name)
    return lambda params: make([p for p in params if p.requires_grad])


def next_token(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    return model(input_ids=ids, labels=ids).loss * ids.numel(), ids.numel()


def llama(
    optimizer: str = "adamw",
    attention: str = "sdpa",
    checkpointing: bool = False,
    dtype: str = "",
    half: bool = False,
    tied: bool = False,
    lora: int = 0,
    experts: int = 0,
    loop: bool = False,
    sequence_length: int = 32,
    **sizes: Any,
) -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    def build() -> nn.Module:
        config: dict[str, Any] = {**SMALL, "attn_implementation": attention, "tie_word_embeddings": tied, **sizes}
        if experts:
            model = MixtralForCausalLM(MixtralConfig(num_local_experts=experts, num_experts_per_tok=2, **config))
            if loop:
                model.set_experts_implementation("eager")
        else:
            model = LlamaForCausalLM(LlamaConfig(**config))
        if dtype:
            model = model.to(getattr(torch, dtype))
        if half:
            model = model.half()
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora, target_modules=["q_proj", "v_proj"]))
        if checkpointing:
            model.gradient_checkpointing_enable()
            if lora:
                model.enable_input_require_grads()
        return model.train()

    return Task(
        model=build,
        dataset=torch.zeros(8, sequence_length, dtype=torch.long),
        loss=next_token,
        optimizer=trainable(optimizer),
    )


def vit(width: int = 64) -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
    )
    return Task(
        model=lambda: ViTForImageClassification(config).train(),
        dataset=torch.zeros(8, 3, 64, 64),
        loss=lambda model, x: (model(pixel_values=x).logits.square().sum(), len(x)),
        optimizer=trainable("adamw"),
    )
