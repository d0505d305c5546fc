"""Switches for `check`: the same model without random draws, without batch statistics, or in fp64 throughout.

They replace torch functions as they are called, so they also work for `F.dropout`, attention's `dropout_p`, noise drawn
in the loss, and casts in the user's code.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# torch's annotations are incomplete, and the base classes of its dropout and BatchNorm modules are private.

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from batchwright.runtime.device import generator_state, set_generator_state

_LOW = {torch.float32, torch.float16, torch.bfloat16}
_DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RAW_DROPOUTS: set[Any] = {torch.dropout, torch.feature_dropout, torch.alpha_dropout}
_BY_SIZE: set[Any] = {torch.rand, torch.randn, torch.randint}
_LIKE: set[Any] = {torch.rand_like, torch.randn_like, torch.randint_like}
_IN_PLACE: set[Any] = {Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_}
_LEAST_DRAWN = 1 << 14
_CASTS: set[Any] = {Tensor.float, Tensor.half, Tensor.bfloat16}
_BACKWARD: set[Any] = {Tensor.backward, torch.autograd.backward}


def without_dropout(model: nn.Module) -> None:
    """Turn off the dropout modules."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def freeze_statistics(model: nn.Module) -> None:
    """Make BatchNorm use its running statistics instead of those of the micro batch."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


class Deterministic(TorchFunctionMode):
    """Remove random draws, or batch statistics, from all torch calls: dropout does nothing, and every row of a batch
    draws the same numbers, for any number of rows."""

    def __init__(self, *, random: bool, statistics: bool, device: torch.device) -> None:
        super().__init__()
        self.random, self.statistics, self.device = random, statistics, device
        self.statistics_uses = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.batch_norm and kwargs.get("training", len(args) > 5 and args[5]):
            self.statistics_uses += 1
            args, kwargs = _running(args, kwargs) if self.statistics else (args, kwargs)
        if func in _BACKWARD:
            return _backward(self, func, args, kwargs)
        if not self.random:
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RAW_DROPOUTS:
            return args[0]
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return _drawn(func, args, kwargs, self.device)


class AllFp64(TorchFunctionMode):
    """Replace lower precisions by fp64, in casts and in new tensors; autocast does not change fp64 tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _BACKWARD:
            return _backward(self, func, args, kwargs or {})
        kwargs = {k: torch.float64 if _is_low(v) else v for k, v in (kwargs or {}).items()}
        if func in _CASTS:
            return args[0].double()
        return func(*[torch.float64 if _is_low(a) else a for a in args], **kwargs)


def _backward(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Run backward with the mode on: a checkpointed part is run again there, and some losses compute there.

    torch switches a mode off while the function runs that it replaces, and so during the whole backward. The engine itself
    is not replaced.
    """
    roots: tuple[Tensor, ...] = (args[0],) if isinstance(args[0], Tensor) else tuple(args[0])
    named = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | dict(kwargs)
    given = named.get("gradient") if func is Tensor.backward else named.get("grad_tensors")
    if given is None and all(root.numel() == 1 for root in roots):
        given = [torch.ones_like(root) for root in roots]
    if given is None:
        return func(*args, **kwargs)  # raises the usual error
    seeds: tuple[Any, ...] = (given,) if isinstance(given, Tensor) else tuple(given)
    # torch's pipelines pass None for a loss.
    seeds = tuple(torch.ones_like(r) if s is None else s for r, s in zip(roots, seeds, strict=True))
    create, inputs = bool(named.get("create_graph")), named.get("inputs")
    keep = create if named.get("retain_graph") is None else bool(named["retain_graph"])
    wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    with mode:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(roots, seeds, keep, create, wanted, allow_unreachable=True, accumulate_grad=True)


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _LOW


def _running(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of F.batch_norm with running statistics, or mean 0 and variance 1 if it has none."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    channels, like = given["input"].shape[1], given["input"]
    if given["running_mean"] is None:
        given |= {"running_mean": like.new_zeros(channels), "running_var": like.new_ones(channels)}
    return (), given | {"training": False}


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """Draw one row and repeat it for all rows, so that no row depends on their number. Call any other function as is."""
    if func in _BY_SIZE:
        at = next((i for i, a in enumerate(args) if isinstance(a, (tuple, list))), None)
        if "size" in kwargs:
            bounds, size = args, kwargs.pop("size")
        else:
            bounds, size = (args[:at], args[at]) if at is not None else ((), args)  # (…, (2, 3)) or (2, 3)
        return _rows(device, tuple(size), lambda n: func(*bounds, (n,), **kwargs))
    if func in _LIKE:
        return _rows(device, args[0].shape, lambda n: func(args[0].new_empty(n), *args[1:], **kwargs))
    if func in _IN_PLACE:
        return args[0].copy_(_rows(device, args[0].shape, lambda n: func(args[0].new_empty(n), *args[1:], **kwargs)))
    if func is torch.bernoulli:
        return (_rows(device, args[0].shape, lambda n: torch.rand(n)) < args[0].cpu()).to(args[0])
    return func(*args, **kwargs)


def _rows(device: torch.device, size: tuple[int, ...], draw: Callable[[int], Tensor]) -> Tensor:
    """Draw one row from a newly seeded generator and repeat it. The row is the beginning of a long draw, so that a
    shorter row (less padding) begins with the same numbers. The draw may be on the CPU or on the model's device."""
    one = (1, *size[1:]) if size else ()
    wanted = prod(one)
    state = torch.get_rng_state()
    there = generator_state(device) if device.type != "cpu" else None
    torch.manual_seed(0)
    try:
        drawn = draw(-(-wanted // _LEAST_DRAWN) * _LEAST_DRAWN)
    finally:
        torch.set_rng_state(state)
        if there is not None:
            set_generator_state(device, there)
    return drawn[:wanted].reshape(one).expand(size).clone()
