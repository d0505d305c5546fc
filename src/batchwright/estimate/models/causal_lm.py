"""A task from a Hugging Face configuration: a causal language model with random weights, trained on random tokens.

Everything is transformers' and peft's own: the layers, their loss, gradient checkpointing, the adapters. It is a task like a
user's, so it can be estimated and probed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchwright.core.errors import PlanError
from batchwright.core.numbers import divisors
from batchwright.runtime.task import Task

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# bitsandbytes: one scale for each 256 values; tensors below 4,096 values keep states of 32 bits, and so do embeddings in
# transformers' Trainer.
BLOCK, SMALL = 256, 4096


def task(
    config: str,
    sequence_length: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    lora: int = 0,
    checkpoint_activations: bool = False,
    layers: int | None = None,
    real: bool = False,
) -> Task:
    """The task; `layers` builds only so many, `real` uses bitsandbytes itself where states are otherwise sized by rule."""
    settings = read_config(config, layers)
    longest = longest_sequence(settings)
    if longest is not None and sequence_length > longest:
        raise PlanError(
            f"sequence_length={sequence_length} is longer than the model's max_position_embeddings {longest}. "
            f"Nearest: {longest}.",
            field="sequence_length",
            given=sequence_length,
            nearest=(longest,),
        )
    kind, pure = precision.partition("-")[0], precision.endswith("-pure")

    def model() -> nn.Module:
        return build(settings, DTYPES[kind] if pure else torch.float32, lora, checkpoint_activations)

    def loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        with torch.autocast(tokens.device.type, DTYPES[kind]) if kind in DTYPES and not pure else nullcontext():
            mean = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        weight = tokens.numel() - tokens.shape[0]  # the first token of a sample has no prediction
        return mean * weight, weight

    vocabulary = getattr(settings.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int) or settings.is_encoder_decoder:
        raise _not_a_language_model(settings)
    return Task(
        model=model,
        dataset=Tokens(vocabulary, sequence_length),
        loss=loss,
        optimizer=optimizers(real)[optimizer],
        example_batch=lambda size: torch.zeros(size, sequence_length, dtype=torch.int64),
    )


class Tokens:
    """Random tokens: a sample depends on its index only."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length,), generator=generator)


def longest_sequence(settings: Any) -> int | None:
    """The positions that a model has; None if it does not say."""
    found = getattr(settings.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def read_config(path: str, layers: int | None = None) -> Any:
    """The configuration in a local file, with fewer layers if asked."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise PlanError(
            f"model={path}: transformers cannot read this configuration: {(str(error).splitlines() or [''])[0]}",
            field="model",
            given=path,
        ) from None
    if layers is not None:
        text = settings.get_text_config()
        whole = text.num_hidden_layers
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == whole:
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
    return settings


def build(settings: Any, dtype: torch.dtype, lora: int, checkpoint_activations: bool) -> nn.Module:
    """The model as a trainer would make it."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    except Exception as error:
        if type(error).__module__.startswith("torch._subclasses"):
            raise  # fake tensors cannot build it: it is built without them
        if "Unrecognized configuration class" in str(error):
            raise _not_a_language_model(settings) from None
        text = (str(error).splitlines() or [""])[0]
        raise PlanError(
            f"model: transformers cannot build this {type(settings).__name__}: {type(error).__name__}: {text}",
            field="model",
            given=type(settings).__name__,
        ) from None
    if checkpoint_activations:
        if not model.supports_gradient_checkpointing:
            raise PlanError(
                f"checkpoint_activations: {type(model).__name__} does not support gradient checkpointing.",
                field="checkpoint_activations",
                given=True,
                nearest=(False,),
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.is_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(module, "layerdrop"):
            module.training = False  # no layer is left out: a random value decides that, and a fake tensor has none
    return model


def _not_a_language_model(settings: Any) -> PlanError:
    name = type(settings).__name__
    message = f"model: {name} is not a causal language model. Write a task for it: FILE.py:function."
    return PlanError(message, field="model", given=name)


def check_split(path: str, devices: int) -> None:
    """Refuse tensor parallelism over devices that cannot have the same number of heads each."""
    text = read_config(path).get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    heads = {name: n for name in names if isinstance(n := getattr(text, name, None), int)}
    common = gcd(*heads.values())
    if common % devices:
        near = [d for d in divisors(common) if d < devices][-1:] + [d for d in divisors(common) if d > devices][:1]
        counts = " and ".join(f"{name} {n}" for name, n in heads.items())
        raise PlanError(
            f"tensor_parallel={devices} must divide the heads of the model: {counts}. "
            f"Nearest: tensor_parallel={' or '.join(map(str, near))}.",
            field="tensor_parallel",
            given=devices,
            nearest=tuple(near),
        )


def optimizers(real: bool) -> dict[str, Callable[[Any], Optimizer]]:
    """Each optimizer by its name."""
    found: dict[str, Callable[[Any], Optimizer]] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-5),
        "adamw-8bit": lambda params: AdamW8bit(params),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-5),
        "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-5),
    }
    if real:
        found["adamw-8bit"] = _bitsandbytes
    return found


def _bitsandbytes(params: Any) -> Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    params = list(params)
    embeddings = [p for p in params if hasattr(p, "is_embedding")]
    GlobalOptimManager.get_instance().override_config(embeddings, "optim_bits", 32)
    return AdamW8bit(params, lr=1e-5)


class AdamW8bit(Optimizer):
    """The memory of bitsandbytes' AdamW8bit, by rule: it updates in place, one tensor at a time. It trains nothing."""

    by_rule = True
    refuses_shards = "bitsandbytes' AdamW8bit takes no shards of FSDP2 (DTensor)"

    def __init__(self, params: Any) -> None:
        super().__init__([p for p in params if p.requires_grad], {})

    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]:
                    continue
                whole = p.numel() < SMALL or hasattr(p, "is_embedding")
                for moment in (1, 2):
                    like = torch.zeros_like(p, dtype=torch.float32 if whole else torch.uint8)
                    self.state[p][f"state{moment}"] = like
                    if not whole:
                        self.state[p][f"absmax{moment}"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)


def alike(path: str) -> int | None:
    """The number of layers if all are the same and a few of them behave as all do; None if they differ.

    Compared are the classes, the parameters and every plain attribute of every module in a layer, and lists of the
    configuration with one entry for each layer.
    """
    whole = read_config(path)
    text = whole.get_text_config()
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or count <= 4:
        return None
    for value in vars(text).values():
        if isinstance(value, list) and len(value) == count and any(one != value[0] for one in value):
            return None
    with torch.device("meta"):
        full = _layers(build(whole, torch.float32, 0, False), count)
        few = _layers(build(read_config(path, 4), torch.float32, 0, False), 4)
    if full is None or few is None:
        return None
    same = _signature(full[0])
    return count if all(_signature(layer) == same for layer in (*full, *few)) else None


def _layers(model: nn.Module, count: int) -> list[nn.Module] | None:
    """The one list of `count` layers, which holds all parameters but embeddings, norms and head; None if there is none."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if len(lists) == 1 else None


def _signature(layer: nn.Module) -> list[Any]:
    plain = (int, float, str, bool, tuple, type(None))
    return [
        (
            name,
            type(module).__qualname__,
            [(key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)],
            sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, plain) and "layer_idx" not in k),
        )
        for name, module in layer.named_modules()
    ]
