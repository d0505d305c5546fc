"""Rows as one block of bytes, so that one host can read them and another train on them.

`pack` writes JSON (the structure) and the raw memory of tensors, arrays and bytes behind it. Rows of equal structure and
shape, which are the usual case, share one description and are copied into one array per member, so a row costs a few
microseconds and `unpack` copies nothing. Dicts with text keys, lists, tuples, numbers, text and None are plain; anything
else (an image object, a named tuple) is pickled, as torch's DataLoader does between its processes. `unpack` runs pickled
code only then.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch

# Every array begins at a multiple of this, so that it can be viewed as any type.
_ALIGNED = 16
_PLAIN = {int: "i", float: "f", str: "s", bool: "b", type(None): "0"}


def pack(rows: Sequence[Any], *, pickled: bool = True) -> torch.Tensor:
    """The rows as one tensor of bytes. With `pickled=False`, a TypeError if something in them would be pickled.

    >>> unpack(pack([{"x": torch.ones(2), "id": 3}, {"x": torch.zeros(2), "id": 4}]))
    [{'x': tensor([1., 1.]), 'id': 3}, {'x': tensor([0., 0.]), 'id': 4}]
    """
    described: list[tuple[Any, list[Any]]] = []
    for row in rows:
        leaves: list[Any] = []
        structure = _describe(row, leaves)
        if not pickled and ["p"] in _leaves(structure):
            raise TypeError("it has a value that is no tensor, array, number, text or list of them")
        described.append((structure, leaves))
    runs: list[Any] = []
    arrays: list[tuple[int, list[Any]]] = []
    size = 0
    for structure, group in groupby(described, key=itemgetter(0)):
        found = [leaves for _, leaves in group]
        count, columns = len(found), list(zip(*found, strict=True))
        members: list[Any] = []
        for column in columns:
            first = column[0]
            if isinstance(first, (torch.Tensor, np.ndarray, np.generic)):
                each = first.nbytes
                members.append(size)
                arrays.append((size, list(column)))
                size += -(-each * count // _ALIGNED) * _ALIGNED
            elif isinstance(first, bytes):
                members.append([size, [len(one) for one in column]])
                arrays.append((size, list(column)))
                size += -(-sum(map(len, column)) // _ALIGNED) * _ALIGNED
            else:
                members.append(list(column))
        runs.append([structure, count, members])
    head = json.dumps(runs, separators=(",", ":")).encode()
    begin = -(-(8 + len(head)) // _ALIGNED) * _ALIGNED
    block = torch.empty(begin + size, dtype=torch.uint8)
    view = block.numpy()
    view[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    view[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    view[8 + len(head) : begin] = 0
    for at, column in arrays:
        _write(block, view, begin + at, column)
    return block


def unpack(block: torch.Tensor, *, pickled: bool = True) -> list[Any]:
    """The rows of `pack`; their tensors and arrays are views of `block`. With `pickled=False` no pickled code is run."""
    view = block.numpy()
    length = int.from_bytes(view[:8].tobytes(), "little")
    begin = -(-(8 + length) // _ALIGNED) * _ALIGNED
    rows: list[Any] = []
    for structure, count, members in json.loads(view[8 : 8 + length].tobytes()):
        kinds = _leaves(structure)
        if not pickled and ["p"] in kinds:
            raise ValueError("it has pickled values")
        columns = [_read(kind, count, member, block, begin) for kind, member in zip(kinds, members, strict=True)]
        for row in range(count):
            rows.append(_build(structure, iter([column[row] for column in columns])))
    return rows


def _describe(value: Any, leaves: list[Any]) -> Any:
    """The structure of a row, as JSON; its values go to `leaves`."""
    kind = cast("type[Any]", type(value))
    if kind is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized:
        lazy = value.requires_grad or value.is_conj() or value.is_neg()
        leaves.append(value.detach().resolve_conj().resolve_neg() if lazy else value)
        return ["t", _name(value.dtype), list(value.shape)]
    if kind is dict and all(type(key) is str for key in value):
        return ["d", list(value), [_describe(one, leaves) for one in value.values()]]
    if kind is list or kind is tuple:
        return ["l" if kind is list else "u", [_describe(one, leaves) for one in value]]
    if (kind is np.ndarray or issubclass(kind, np.generic)) and value.dtype.kind in "biufc":
        leaves.append(value)
        return ["a" if kind is np.ndarray else "g", value.dtype.str, list(value.shape)]
    if kind in _PLAIN:
        leaves.append(value)
        return [_PLAIN[kind]]
    if kind is bytes:
        leaves.append(value)
        return ["y"]
    leaves.append(pickle.dumps(value, protocol=5))
    return ["p"]


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(block: torch.Tensor, view: np.ndarray[Any, Any], at: int, column: list[Any]) -> None:
    first = column[0]
    if isinstance(first, torch.Tensor):
        if first.nbytes:
            size = first.nbytes * len(column)
            into = block[at : at + size].view(first.dtype).view(len(column), *first.shape)
            torch.stack(column, out=into)
    elif isinstance(first, bytes):
        joined = b"".join(column)
        view[at : at + len(joined)] = np.frombuffer(joined, np.uint8)
    elif first.nbytes:
        size = first.nbytes * len(column)
        into = view[at : at + size].view(first.dtype).reshape(len(column), *first.shape)
        for row, one in enumerate(column):
            into[row] = one


def _read(kind: Any, count: int, member: Any, block: torch.Tensor, begin: int) -> Sequence[Any]:
    """One member of all rows of a run."""
    name = kind[0]
    if name == "t":
        dtype, shape = getattr(torch, kind[1]), kind[2]
        size = count * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if not size:
            return [torch.empty(shape, dtype=dtype) for _ in range(count)]
        return block[begin + member : begin + member + size].view(dtype).view(count, *shape).unbind()
    if name in ("a", "g"):
        dtype, shape = np.dtype(kind[1]), kind[2]
        size = count * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        array = block.numpy()[begin + member : begin + member + size].view(dtype).reshape(count, *shape)
        return (
            list(array) if name == "a" and shape else [one.copy() if name == "a" else one[()] for one in _each(array)]
        )
    if name in ("y", "p"):
        at, lengths = begin + member[0], member[1]
        found: list[Any] = []
        for length in lengths:
            data = block.numpy()[at : at + length].tobytes()
            found.append(pickle.loads(data) if name == "p" else data)
            at += length
        return found
    return member


def _each(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [array[row : row + 1].reshape(array.shape[1:]) for row in range(len(array))]


def _leaves(structure: Any) -> list[Any]:
    if structure[0] == "d":
        return [leaf for one in structure[2] for leaf in _leaves(one)]
    if structure[0] in ("l", "u"):
        return [leaf for one in structure[1] for leaf in _leaves(one)]
    return [structure]


def _build(structure: Any, leaves: Any) -> Any:
    kind = structure[0]
    if kind == "d":
        return {key: _build(one, leaves) for key, one in zip(structure[1], structure[2], strict=True)}
    if kind == "l":
        return [_build(one, leaves) for one in structure[1]]
    if kind == "u":
        return tuple(_build(one, leaves) for one in structure[1])
    return next(leaves)
