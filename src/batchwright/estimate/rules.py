"""Memory that fake tensors do not show, by rule. Each rule is stated in the assumptions of the estimate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

# NF4 with double quantisation, as QLoRA has it: a scale of one byte for 64 weights, and four bytes for 256 scales.
BLOCK, SCALES = 64, 256


@dataclass(frozen=True)
class FourBits:
    """The weights of frozen linear layers, stored in four bits: bytes saved, and those of the largest as it is computed with."""

    layers: int
    saved_bytes: int
    largest_bytes: int

    @property
    def assumption(self) -> str:
        return (
            f"rule: the weights of {self.layers} frozen linear layers take 4 bits each, a scale of 1 byte per {BLOCK} "
            f"and 4 bytes per {BLOCK * SCALES} weights (QLoRA); one layer at a time is converted for its computation."
        )


def four_bit_bytes(weights: int) -> int:
    """Bytes of that many weights in four bits, with their scales.

    >>> four_bit_bytes(64 * 256)
    8452
    """
    scales = -(-weights // BLOCK)
    return -(-weights // 2) + scales + 4 * -(-scales // SCALES)


def four_bits(model: nn.Module) -> FourBits:
    """What it changes that frozen linear layers are stored in four bits.

    >>> layer = nn.Linear(64, 256, bias=False).requires_grad_(False)
    >>> four_bits(nn.Sequential(layer, nn.Linear(2, 2)))
    FourBits(layers=1, saved_bytes=57084, largest_bytes=65536)
    """
    # Embeddings, and a head that shares their weights or follows the last layer, stay as they are.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is head}
    weights = {
        id(m.weight): m.weight
        for m in model.modules()
        if isinstance(m, nn.Linear) and not m.weight.requires_grad and id(m.weight) not in kept
    }
    sizes = [(w.numel(), w.numel() * w.element_size()) for w in weights.values()]
    return FourBits(
        layers=len(sizes),
        saved_bytes=sum(held - four_bit_bytes(count) for count, held in sizes),
        largest_bytes=max((held for _, held in sizes), default=0),
    )


def bucket_bytes(model: nn.Module) -> int:
    """The buckets in which DDP sums gradients, as large as all of them: they are not the gradients' own memory by default.

    >>> bucket_bytes(nn.Sequential(nn.Linear(2, 2), nn.Linear(8, 8).requires_grad_(False)))
    24
    """
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def route_uniformly(model: nn.Module) -> tuple[str, ...]:
    """Let the experts of a Hugging Face model compute in groups; the assumption, or nothing if there are none.

    A loop over experts reads which tokens go where, which a fake tensor cannot say. Grouped products hold the same rows,
    however tokens are routed.
    """
    found = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if not getattr(config, "num_experts_per_tok", None):
            continue
        choose = getattr(module, "set_experts_implementation", None)
        if getattr(config, "_experts_implementation", None) == "eager" and callable(choose):
            try:
                choose("grouped_mm")
            except ValueError:  # a model that has only its own way (Llama 4 computes all tokens with every expert)
                return ()
        found = True
    text = (
        "uniform routing: every token is computed by as many experts as the configuration says, in grouped products; no "
        "expert drops or pads tokens."
    )
    return (text,) if found else ()


@register_op_impl(torch.ops.aten._grouped_mm.default)
def _grouped_mm(
    mode: FakeTensorMode,
    func: object,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of a grouped product: torch's own fake version refuses fp32, which the CPU computes."""
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    with mode:
        return a.new_empty(shape, dtype=out_dtype or a.dtype)
