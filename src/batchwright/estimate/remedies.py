"""What would fit where nothing does: each change alone, then together, then more ranks, with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from batchwright.core.errors import PlanError

from .records import EstimateRequest, Point, Remedy
from .walks import CLOSED, Walks

LORA_RANK = 16  # the usual one; the memory hardly depends on it
MOST_TRIED = 2**10  # ranks
STATES = ("parameters", "gradients", "optimizer")


def remedies(request: EstimateRequest, size: int, limit: int, walks: Walks) -> tuple[Remedy, ...]:
    """The changes that were tried at this size, those that fit first, then by memory."""
    found = [
        _remedy(names, point, limit)
        for names, variant in _variants(request)
        if (point := _point(variant, size, limit, walks)) is not None
    ]
    found += _ranks((), request, size, limit, walks)
    if not request.checkpoint_activations:
        found += _ranks(("checkpoint_activations",), replace(request, checkpoint_activations=True), size, limit, walks)
    return tuple(sorted(found, key=lambda r: (not r.fits, r.change.count("+"), r.peak_memory_bytes)))


def _remedy(names: tuple[str, ...], point: Point, limit: int) -> Remedy:
    return Remedy(" + ".join(names), point.peak_memory_bytes, point.peak_memory_bytes <= limit, point.source)


def _point(variant: EstimateRequest, size: int, limit: int, walks: Walks) -> Point | None:
    """The peak, from all layers where it fits; None if the model cannot be trained in this way."""
    try:
        point = walks.point(variant, size)
    except PlanError as error:
        if error.field in CLOSED:
            return None
        raise
    return walks.point(variant, size, whole=True) if point.peak_memory_bytes <= limit else point


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


def _ranks(names: tuple[str, ...], variant: EstimateRequest, size: int, limit: int, walks: Walks) -> Iterator[Remedy]:
    """The fewest ranks, in doublings, over which a variant fits: solved from one sharded walk, then walked."""
    # Ranks that are there already come first.
    first = variant.replicas if variant.replicas > 1 else variant.ranks * 2
    variant = replace(variant, replicas=1)
    point = _point(replace(variant, ranks=first), size, limit, walks)
    if point is None:
        return
    ranks = first
    if point.peak_memory_bytes > limit:
        # The states are divided; the rest, which includes what is gathered, stays.
        divided = sum(point.breakdown.get(name, 0) for name in STATES)
        stays = point.peak_memory_bytes - divided
        ranks = max(first * 2, _doubled(first, first * divided / (limit - stays))) if stays < limit else first
        if first < ranks <= MOST_TRIED:
            point = _point(replace(variant, ranks=ranks), size, limit, walks)
        else:
            ranks = first
    assert point is not None
    yield _remedy((*names, f"ranks={ranks}"), point, limit)


def _doubled(start: int, least: float) -> int:
    while start < least:
        start *= 2
    return start
