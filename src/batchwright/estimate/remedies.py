"""What would fit where nothing does: each change alone, then together, then more ranks, with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .records import EstimateRequest, Remedy
from .walks import Walks

LORA_RANK = 16  # the usual one; the memory hardly depends on it
MOST_RANKS = 2**10


def remedies(request: EstimateRequest, size: int, limit: int, walks: Walks) -> tuple[Remedy, ...]:
    """The changes that were tried at this size, those that fit first, then by memory."""
    found: list[Remedy] = []
    for names, variant in _variants(request):
        point = walks.point(variant, size)
        found.append(Remedy(" + ".join(names), point.peak_memory_bytes, point.peak_memory_bytes <= limit, point.source))
    for variant in (request, replace(request, checkpoint_activations=True)):
        if variant is request or variant != request:
            found += _ranks(request, variant, size, limit, walks)
    return tuple(sorted(found, key=lambda r: (not r.fits, r.change.count("+"), r.peak_memory_bytes)))


def _variants(request: EstimateRequest) -> Iterator[tuple[tuple[str, ...], EstimateRequest]]:
    """Each change alone; then for a model what people combine. A change that is made already is left out."""
    checkpoint = {} if request.checkpoint_activations else {"checkpoint_activations": True}
    if checkpoint:
        yield ("checkpoint_activations",), replace(request, checkpoint_activations=True)
    if request.model is None:
        if request.precision == "fp32":
            yield ("precision=bf16",), replace(request, precision="bf16")
            if checkpoint:
                yield ("checkpoint_activations", "precision=bf16"), replace(request, precision="bf16", **checkpoint)
        return
    pure = {} if request.precision.endswith("-pure") else {"precision": "bf16-pure"}
    lora = {} if request.lora else {"lora": LORA_RANK}
    eight = {"optimizer": "adamw-8bit"} if request.optimizer == "adamw" and not request.lora else {}
    for change in (lora, eight, pure):
        if change:
            yield _named(change), replace(request, **change)
    for together in ({**checkpoint, **lora}, {**checkpoint, **lora, **pure}, {**checkpoint, **eight, **pure}):
        if len(together) > 1:
            yield _named(together), replace(request, **together)


def _named(changes: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name if value is True else f"{name}={value}" for name, value in changes.items())


def _ranks(request: EstimateRequest, variant: EstimateRequest, size: int, limit: int, walks: Walks) -> Iterator[Remedy]:
    """The fewest ranks, in doublings, over which a sharded variant fits: a part of the peak is divided, a part stays."""
    extra = ("checkpoint_activations",) if variant.checkpoint_activations != request.checkpoint_activations else ()
    ranks = request.ranks * 2
    last = None
    while ranks <= MOST_RANKS:
        point = walks.point(replace(variant, ranks=ranks), size)
        last = Remedy(
            " + ".join((*extra, f"ranks={ranks}")),
            point.peak_memory_bytes,
            point.peak_memory_bytes <= limit,
            point.source,
        )
        if last.fits:
            break
        divided = point.breakdown.get("parameters", 0) + point.breakdown.get("gradients", 0)
        divided += point.breakdown.get("optimizer", 0)
        stays = point.peak_memory_bytes - divided
        if stays >= limit:
            break  # more ranks divide the states only
        # The part that stays includes what is gathered, so this is the fewest that may fit.
        ranks = max(ranks * 2, _doubled(request.ranks, ranks * divided / (limit - stays)))
    if last is not None:
        yield last


def _doubled(start: int, least: float) -> int:
    while start < least:
        start *= 2
    return start
