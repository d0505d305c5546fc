"""Does a loss add up, and over what is it a mean? Measured on one micro batch, in the first step of a launch.

A loss that is a weighted mean over samples passes at any split: the mean of a micro batch is that of its halves, recombined by
their weights, and so is its gradient. One with in-batch negatives, a sum where a mean is expected, or a wrong weight does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from batchwright.core.errors import RunError
from batchwright.runtime.check.switches import Deterministic, freeze_statistics, without_dropout
from batchwright.runtime.data.windows import leading_size
from batchwright.runtime.device import generator_state, set_generator_state
from batchwright.runtime.state.generators import put_back, set_seeds

Weight = Callable[[Any], Any]  # of a batch: a number, or a tensor with one element
# How far apart two losses, and two gradients, may be: rounding, relative to their size. Measured: 3e-7 to 9e-7 in fp32 (2 and
# 24 layers); 3e-3 and 5e-3 in bf16 on tiny models, and it grows with the depth. TF32 has 10 bits: an assumption.
FP32, TF32, HALF = (1e-4, 1e-4), (1e-3, 1e-2), (5e-2, 0.1)
_ROUNDING = torch.finfo(torch.float32).eps  # of 1 + x: a loss is log(1 + x) where a model is nearly certain
_FEW = 8  # parameters whose gradients are compared
_AGAINST_UNDERFLOW = 2.0**10  # of gradients in fp16; they are compared relative to their norm
_SEEDS = range(4)  # a permutation of two samples differs between them, of torch, numpy and Python


def labels_that_count(shifted: bool, samples: bool = False) -> Weight:
    """A default weight: labels that are not -100, or those without the first of each row; `samples` where there are no labels.

    All labels that are not integers count: they are no classes, and a mean of their errors takes -100.0 as a number.

    >>> batch = {"labels": torch.tensor([[5, -100, 7], [5, 6, -100]])}
    >>> labels_that_count(shifted=False)(batch), labels_that_count(shifted=True)(batch)
    (tensor(4), tensor(2))
    >>> labels_that_count(shifted=False, samples=True)((torch.ones(4, 2), torch.ones(4)))
    4.0
    >>> labels_that_count(shifted=True)({"labels": torch.tensor([[-100.0, 1.0], [2.0, 3.0]])})
    4.0
    """
    return partial(_count, shifted, samples)  # not a closure: it can be pickled


def _count(shifted: bool, samples: bool, batch: Any) -> Tensor | float:
    found = _labels(batch)
    if found is None and samples:
        return float(leading_size(batch))
    if found is None:
        raise RunError(
            "the batch has no tensor `labels`, so the weight of a micro batch is unknown. Pass weight=, a function "
            'of the batch: what its loss is a mean over, such as weight=lambda batch: len(batch["input_ids"]).',
            field="weight",
        )
    if found.is_floating_point():
        return float(found.numel())
    return (
        (found[..., 1:] if shifted and _has_rows_of_labels(batch) else found) != -100
    ).sum()  # a tensor: an estimate cannot read its value


_KNOWN: dict[str, Weight] = {
    "labels that are not -100": labels_that_count(shifted=False),
    "labels that are not -100, without the first of each row": labels_that_count(shifted=True),
    "samples": leading_size,
}


def uses_first_label(loss: Callable[[Any], Any], batch: Any) -> bool | None:
    """Whether the loss uses the first label of each row: a causal language model does not. None if it cannot be measured.

    The loss with first labels only, against that without a label: both are NaN, or equal, if the first ones are not used.

    >>> batch = {"labels": torch.tensor([[1, 2, 3]])}
    >>> uses_first_label(lambda b: (b["labels"] != -100).sum(), batch)
    True
    >>> uses_first_label(lambda b: (b["labels"][:, 1:] != -100).sum(), batch)
    False
    """
    labels = _labels(batch)
    if labels is None or not _has_rows_of_labels(batch):
        return None
    found: list[float] = []
    for left in (1, 0):
        made, only = copy.copy(batch), torch.full_like(labels, -100)
        only[..., :left] = labels.amax().clamp(min=0)  # a class that exists
        try:
            made["labels"] = only
            found.append(float(loss(made)))
        except Exception:  # a loss may refuse to have no label
            return None
    return found[0] != found[1] and not all(map(isnan, found))


def weighed(candidates: Sequence[Weight]) -> Callable[[Callable[[Any], Any], Any], Any]:
    """The weight of a batch, for `check`, `probe` and `estimate`: of two candidates, the first loss of real data decides."""
    known: list[Weight] = list(candidates) if len(candidates) == 1 else []

    def weigh(loss: Callable[[Any], Any], batch: Any) -> Any:
        if not known and not isinstance(_labels(batch), FakeTensor):
            with torch.no_grad(), put_back():
                known.append(candidates[-1 if uses_first_label(loss, batch) is False else 0])
        return (known or candidates)[0](batch)

    return weigh


def warn_of_batch_statistics(model: nn.Module, warn: Callable[[str], Any]) -> None:
    """Name what no test of the loss can refuse: layers that normalise over the micro batch, whatever the weight."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        warn(
            f"{len(names)} BatchNorm layer(s), such as {names[0]!r}, normalise over the micro batch, so the gradient depends "
            "on the split. Everything else is exact. LayerNorm or GroupNorm do not depend on it, nor does a BatchNorm in "
            "eval mode.",
        )


@contextmanager
def without_draws(model: nn.Module) -> Generator[None]:
    """Run the model in training mode, but without dropout, other random draws and gradients; then as it was, with its buffers."""
    device = _device(model)
    modes = {module: module.training for module in model.modules()}
    recurrent = {module: module.dropout for module in model.modules() if isinstance(module, nn.RNNBase)}
    # Noise on embeddings (NEFTune): its scale depends on the padded length.
    noisy: dict[Any, Any] = {m: m.neftune_noise_alpha for m in model.modules() if hasattr(m, "neftune_noise_alpha")}
    held = [(module._buffers, name, b) for module in model.modules() for name, b in module._buffers.items()]  # pyright: ignore[reportPrivateUsage]
    copies = [None if b is None else b.detach().clone() for *_, b in held]
    model.train()
    without_dropout(model)
    freeze_statistics(model)
    for module in noisy:
        module.neftune_noise_alpha = 0.0
    try:
        with torch.no_grad(), Deterministic(random=True, statistics=True, device=device):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for module, dropout in recurrent.items():
            module.dropout = dropout
        for module, alpha in noisy.items():
            module.neftune_noise_alpha = alpha
        with torch.no_grad():
            for (buffers, name, buffer), kept in zip(held, copies, strict=True):
                buffers[name] = buffer
                if buffer is not None and kept is not None:
                    buffer.copy_(kept)


@dataclass(frozen=True)
class Pieces:
    """A micro batch as a whole, and its two halves: what each weight counts in a half, and its data."""

    whole: Any
    parts: tuple[tuple[list[float], Any], ...]
    missing: str = ""
    """Why there are no parts."""
    larger: bool = False
    """Two samples, where training takes one: they may not fit into memory."""


def pieces(
    samples: Sequence[Any],
    weights: Iterable[Weight],
    collate: Callable[[list[Any]], Any],
    before: Callable[[Any], Any] = lambda data: data,
    after: Callable[[Any], Any] = lambda data: data,
) -> Pieces:
    """Collate samples as a whole and in halves. Weights count what `before` returns; the model gets what `after` returns.

    If the same samples give other data a second time (masks, augmentations), the rows of the whole are divided instead.
    """
    counted, middle = list(weights), len(samples) // 2

    def made(rows: Sequence[Any], seed: int = 0) -> tuple[Any, list[float], Any]:
        with put_back():
            set_seeds(seed, accelerator=False)
            host = before(collate(copy.deepcopy(list(rows))))
            weighed = [_counted(weight, host) for weight in counted]
            return host, weighed, after(host)

    host, _, whole = made(samples)
    if not middle:
        return Pieces(whole, (), "there is one sample")
    if all(_equal(whole, made(samples, seed)[2]) for seed in _SEEDS[1:]):
        return Pieces(whole, tuple(made(rows)[1:] for rows in (samples[:middle], samples[middle:])))
    halves = slice(middle), slice(middle, None)
    hosts, wholes = ([_rows(data, len(samples), half) for half in halves] for data in (host, whole))
    if None in (*hosts, *wholes):
        return Pieces(
            whole,
            (),
            "the collate function, or a hook, draws, and the data cannot be divided by rows: tensors are needed",
        )
    weighed = [[_counted(weight, part[0]) for weight in counted] for part in hosts if part]
    return Pieces(whole, tuple((w, part[0]) for w, part in zip(weighed, wholes, strict=True) if part))


def test(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    candidates: Sequence[Weight],
    divided: Callable[[Sequence[Weight]], Pieces],
    *,
    half: bool,
    largest: Callable[[list[float]], list[float]],
    warn: Callable[[str], Any],
    compare: bool = True,
    without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    routers: Sequence[tuple[Any, str]] = (),
) -> Weight:
    """The candidate that the loss is a mean over; refuse a loss that adds up with none of them.

    Every rank runs the model equally often, since it may be collective, and `largest` takes the maximum over the ranks. The
    gradients of the model must be None, and are None afterwards.
    """
    if not compare and len(candidates) == 1:
        return candidates[0]
    device = _device(model)
    drawn = generator_state(device) if device.type != "cpu" else None
    asked = [*candidates, *_KNOWN.values()]
    try:
        found = divided(asked)
        with without_draws(model), without_sync():
            if len(candidates) > 1 and not _has_rows_of_labels(found.whole):
                candidates = candidates[:1]  # no label is the first of a row
            first = uses_first_label(loss, found.whole) if len(candidates) > 1 else None
            if len(candidates) > 1:
                unused, used = largest([float(first is False), float(first is True)])
                first = None if unused == used else bool(used)
            if not compare:
                return _chosen(candidates, first)
            allowed = _allowed(model, half)
            differences, seen = _differences(model, loss, found, len(asked), largest)
            fits = [loss <= allowed[0] and gradient <= allowed[1] for loss, gradient in differences]
            if not any(fits[: len(candidates)]):
                with _without_router(model, routers) as router:
                    alone = _differences(model, loss, found, len(asked), largest)[0] if router else differences
                fits = [loss <= allowed[0] and gradient <= allowed[1] for loss, gradient in alone]
                if not any(fits[: len(candidates)]):
                    raise RunError(_refusal(alone, fits, found, len(candidates)), field="loss", given=alone[0][0])
                at = fits.index(True)
                warn(
                    "The balance loss of the router is a statistic of each micro batch, so it depends on the split: the loss "
                    f"of a micro batch is {differences[at][0]:.2g} away from that of its halves, its gradient "
                    f"{differences[at][1]:.2g}, and without the balance loss {alone[at][0]:.2g} and {alone[at][1]:.2g}. "
                    "Everything else is exact."
                )
    finally:
        if drawn is not None:
            set_generator_state(device, drawn)
    if not seen:
        warn(
            f"The test whether the loss adds up saw nothing: {found.missing or 'out of memory'}. additive=False skips the test."
        )
    return _chosen([weight for weight, fit in zip(candidates, fits, strict=False) if fit], first)


def _chosen(candidates: Sequence[Weight], first: bool | None) -> Weight:
    """Of (labels, labels without the first of each row), by whether the loss uses the first; or the only one."""
    if first is None and len(candidates) > 1:
        raise RunError(
            "the loss was not measured without labels, so it is not known whether it uses the first label of each row. Pass "
            'weight=: what it is a mean over, such as weight=lambda batch: (batch["labels"][:, 1:] != -100).sum().',
            field="weight",
        )
    return candidates[-1 if first is False else 0]


def _differences(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    found: Pieces,
    count: int,
    largest: Callable[[list[float]], list[float]],
) -> tuple[list[tuple[float, float]], bool]:
    """For each weight, how far the loss and the gradient of the parts are from those of the whole; whether any rank saw them.

    The gradient, of the smallest parameters, also sees a wrong weight on a new model, where the losses of all samples are
    nearly equal. Both are relative to the sizes of the parts: positive and negative ones may add up to nearly 0. What rounding
    explains counts as 0: `_ROUNDING` of the loss, and of the gradient the same share, up to what half precision is allowed.
    """
    chosen: list[nn.Parameter] = []

    def run(data: Any) -> tuple[float, Tensor]:
        with torch.enable_grad():
            value = loss(data).float()
            (value * _AGAINST_UNDERFLOW).backward()
        if not chosen:
            used = [p for p in model.parameters() if p.grad is not None and bool(p.grad.count_nonzero())]
            chosen.extend(sorted(used, key=torch.numel)[:_FEW])  # not all: their copies might not fit
        # One norm for all of them: some gradients are zero but for rounding, such as that of a key's bias in attention.
        grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in chosen]
        model.zero_grad(set_to_none=True)
        gradient = (
            torch.cat([g.to("cpu", torch.float64) for g in grads]) if grads else torch.zeros(1, dtype=torch.float64)
        )
        return float(value.detach()), gradient

    full: tuple[float, Tensor] | None = None
    try:
        full = run(found.whole)
    except torch.OutOfMemoryError:
        if not found.larger:
            raise
        model.zero_grad(set_to_none=True)
    (failed,) = largest([float(full is None)])
    if failed or full is None:
        return [(0.0, 0.0)] * count, False
    # Every part is run, also one without weight: other ranks wait for its collectives.
    parts = [run(data) for _, data in found.parts or [([], found.whole)] * 2]
    flat: list[float] = []
    for index in range(count):
        weights = [counted[index] for counted, _ in found.parts]
        total = sum(weights)
        if not weights:
            flat += [0.0, 0.0]
            continue
        if not total > 0:
            flat += [float("inf")] * 2
            continue
        pairs = [(part, weight / total) for part, weight in zip(parts, weights, strict=True) if weight]
        joined = sum(value * share for (value, _), share in pairs)
        gradient = sum((one * share for (_, one), share in pairs), torch.zeros_like(full[1]))
        size = max(abs(full[0]), sum(abs(value) * share for (value, _), share in pairs))
        norm = max(float(full[1].norm()), sum(float(one.norm()) * share for (_, one), share in pairs))
        apart, turned = abs(joined - full[0]), float((gradient - full[1]).norm()) / (norm or 1.0)
        flat += [0.0 if apart <= _ROUNDING else apart / (size or 1.0)]
        flat += [0.0 if turned * size <= _ROUNDING and turned <= HALF[1] else turned]
    *flat, seen = largest([*flat, float(bool(found.parts))])
    return list(zip(flat[::2], flat[1::2], strict=True)), bool(seen)


def _refusal(differences: list[tuple[float, float]], fits: list[bool], found: Pieces, candidates: int) -> str:
    loss, gradient = min(differences[:candidates])
    counts = " and ".join(f"{counted[0]:g}" for counted, _ in found.parts)
    fitting = [name for name, fit in zip(_KNOWN, fits[-len(_KNOWN) :], strict=True) if fit]
    hint = f" It fits a mean over {fitting[0]}." if fitting else ""
    return (
        f"the loss does not add up: for one micro batch it is {loss:.2%} away from that of its two halves, recombined by weight, "
        f"and its gradient {gradient:.2%}. Either weight= is not what the loss is a mean over"
        + (f" (it counts {counts} in the halves)" if counts else "")
        + ", or the loss of a sample depends on the others in its micro batch (in-batch negatives, padding without a mask), or "
        f"it is a sum: then divide it by its weight.{hint} additive=False skips this test."
    )


def _allowed(model: nn.Module, half: bool) -> tuple[float, float]:
    """What rounding may do to the loss, and to the gradient."""
    precision = torch.get_float32_matmul_precision()
    quantised = {p.dtype for p in model.parameters()} - {torch.float32, torch.float64}  # it computes in half precision
    if half or quantised or precision == "medium":
        return HALF
    convolutions = torch.backends.cudnn.allow_tf32 and any(isinstance(module, _ConvNd) for module in model.modules())
    return TF32 if precision == "high" or (_device(model).type != "cpu" and convolutions) else FP32


@contextmanager
def _without_router(model: nn.Module, routers: Sequence[tuple[Any, str]]) -> Generator[bool]:
    """Switch off the balance loss of a mixture of experts; False if the model has none."""
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    switches = [*((config, "output_router_logits") for config in configs.values()), *routers]
    on = [(owner, name) for owner, name in switches if getattr(owner, name, False) is True]
    for owner, name in on:
        setattr(owner, name, False)
    try:
        yield bool(on)
    finally:
        for owner, name in on:
            setattr(owner, name, True)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _labels(batch: Any) -> Tensor | None:
    names = ("shift_labels", "labels") if hasattr(batch, "get") else ()
    return next((found for name in names if torch.is_tensor(found := batch.get(name))), None)


def _has_rows_of_labels(batch: Any) -> bool:
    """Whether each sample has several labels, which are classes, so that a loss may leave out the first one."""
    labels = _labels(batch)
    return labels is not None and not labels.is_floating_point() and labels.dim() > 1 and "shift_labels" not in batch


def _counted(weight: Weight, data: Any) -> float:
    try:
        return float(weight(data))
    except RunError:  # it has no labels, or no shape
        return float("nan")


def _rows(data: Any, count: int, part: slice) -> tuple[Any] | None:
    """These rows of a batch, in a tuple; None if something in it is no tensor with that many rows."""
    if isinstance(data, Mapping):
        named = cast("Mapping[Any, Any]", data)
        found = {name: one[0] for name, value in named.items() if (one := _rows(value, count, part))}
        return (found,) if len(found) == len(named) else None
    if isinstance(data, (list, tuple)):
        kind, members = type(data), [_rows(value, count, part) for value in cast("Sequence[Any]", data)]
        parts = [one[0] for one in members if one]
        if len(parts) < len(members):
            return None
        return (kind(*parts) if hasattr(kind, "_fields") else kind(parts),)
    return (data[part],) if torch.is_tensor(data) and data.dim() and len(data) == count else None


def _equal(one: Any, two: Any) -> bool:
    """Whether two batches are equal; what is no tensor, mapping or sequence counts as equal."""
    if torch.is_tensor(one):
        return torch.is_tensor(two) and torch.equal(one, two)
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(_equal(one[name], two[name]) for name in cast("Mapping[Any, Any]", one))
    if isinstance(one, (list, tuple)):
        return len(cast("Sequence[Any]", one)) == len(two) and all(map(_equal, cast("Sequence[Any]", one), two))
    return True
