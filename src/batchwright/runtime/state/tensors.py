"""Tensors on disk: torch.distributed.checkpoint with what surrounds the tensors taken out of the pickles.

A model's and an optimizer's state are nested dicts. They are taken apart into two flat ones: `path -> tensor`, which
DCP stores and reshards over any number of ranks, and `path -> number, text, flag`, which is JSON. So no pickled object
is ever needed back: DCP's own metadata, which is a pickle, is read through an allow-list, and tensors are read with
`weights_only`. A checkpoint from a stranger may hold wrong numbers; it cannot run code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import EnumMeta
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as _load
from torch.distributed.checkpoint.state_dict_saver import save as _save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from batchwright.core.errors import RunError, Violation, raise_violations

_META = "torch.distributed.checkpoint.metadata"
# All that DCP's metadata of plain tensors is made of (torch 2.6 to 2.13). Data classes, an enumeration, paths, and a
# function that looks a layout up by its name; torch.<dtype> is checked apart.
_ALLOWED = {
    *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                                 "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
}  # fmt: skip
_FILE = re.compile(r"__\d+_\d+\.distcp")
Scalar = str | int | float | bool | None


def split(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a model and its optimizers as two flat dicts: tensors by path, and the rest, which is JSON."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for path, value in _leaves(_whole(model, optimizers)):
        if isinstance(value, Tensor):
            tensors[path] = value
        elif _is_plain(value):
            rest[path] = value
        else:
            raise RunError(
                f"{path} of type {type(value).__name__} cannot be saved: a checkpoint holds tensors, and JSON. Keep it "
                "out of state_dict(), or turn it into tensors, numbers or text.",
                field=path,
                given=type(value).__name__,
            )
    return tensors, rest


def join(
    model: nn.Module, optimizers: tuple[Optimizer, ...], tensors: dict[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """The inverse of `split`: put the loaded values back into the model and its optimizers.

    What `load` left out belongs to parameters that never had a gradient: their state is dropped again.
    """
    whole = _whole(model, optimizers)
    known = {path: value for path, value in _leaves(whole)}
    unused = {p.split("/")[2] for p, value in known.items() if isinstance(value, Tensor) and p not in tensors}
    loaded = _rebuilt(whole, "", tensors, rest)
    groups = loaded["optimizer"].get("param_groups", [])
    for path in rest.keys() - known.keys():  # an option that a fresh optimizer does not have yet, such as `initial_lr`
        owner, *inner = path.split("/")
        if owner == "optimizer" and inner[:1] == ["param_groups"]:
            if int(inner[1]) >= len(groups):
                raise RunError(
                    f"the optimizer has {len(groups)} parameter groups here, but more in the checkpoint. Nothing was "
                    "loaded; make it of the same groups.",
                    field="optimizer",
                    given=len(groups),
                )
            groups[int(inner[1])][inner[2]] = rest[path]
    set_state_dict(model, optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    own = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    for (optimizer, group), named in zip(own, groups, strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            if name in unused:
                optimizer.state.pop(parameter, None)


def _whole(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, Any]:
    of_model, of_optimizers = get_state_dict(model, optimizers)
    return {"model": of_model, "optimizer": of_optimizers}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}/{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(inner, (Mapping, Tensor, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}/{index}")
    else:
        yield path, value


def _rebuilt(value: Any, path: str, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {k: _rebuilt(v, f"{path}/{k}" if path else str(k), tensors, rest) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(inner, (Mapping, Tensor, list)) for inner in value):
        return [_rebuilt(inner, f"{path}/{index}", tensors, rest) for index, inner in enumerate(value)]
    if isinstance(value, Tensor):
        return tensors.get(path, value)
    saved = rest.get(path, value)
    return tuple(saved) if isinstance(value, tuple) and isinstance(saved, list) else saved


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, (str, bool, int, float))


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, which training cannot change any more."""
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    moved = {path: tensor.detach() for path, tensor in tensors.items()}
    if any(tensor.device.type != "cpu" for tensor in moved.values()):
        moved = _offload_state_dict_to_cpu(moved)
    # `.cpu()` of what is on the CPU already is no copy.
    return {p: t.clone() if tensors[p].device.type == "cpu" else t for p, t in moved.items()}


def save(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> dict[str, tuple[int, str]]:
    """Store tensors with the ranks of `group`; the size and SHA-256 of each file that this rank wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(folder, overwrite=False)
    writer.fs = files = _Hashing()
    with _as_one_error():
        _save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    return {name.removesuffix(".tmp"): fact for name, fact in files.written.items()}


def load(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill `tensors`, sharded or not, in place; first compare their names and shapes with what is stored.

    The optimizer's state of a parameter that had no gradient before the save is taken out of `tensors`.
    """
    reader = SafeReader(folder)
    stored = reader.read_metadata()
    for path in _never_stepped(tensors, stored):
        del tensors[path]
    raise_violations(RunError, _differences(tensors, stored, folder))
    try:
        with _as_one_error():
            _load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except (pickle.UnpicklingError, RuntimeError, AssertionError, OSError, EOFError) as error:
        if not error.__suppress_context__:  # not from reading: a rank died, and its peers say so
            raise
        reason = str(error).strip().splitlines()
        raise RunError(
            f"the tensors in {folder} cannot be read: {next((r for r in reason if 'GLOBAL' in r), reason[0])} Nothing of "
            "them was run, but the model may hold a part of them: do not go on with it.",
            field="tensors",
            given=str(folder),
        ) from error


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, in this process: to look into one without its model."""
    stored = SafeReader(folder).read_metadata().state_dict_metadata
    tensors = {p: torch.empty(m.size, dtype=m.properties.dtype) for p, m in stored.items()}  # type: ignore[union-attr]
    load(tensors, folder, None)
    return tensors


def _never_stepped(tensors: Mapping[str, Tensor], stored: Metadata) -> list[str]:
    """Paths of parameters none of whose optimizer state was saved, where that of others was.

    An optimizer makes a parameter's state at its first gradient, but DCP, to load into it, that of all parameters.
    """
    start = "optimizer/state/"
    present = {path.split("/")[2] for path in stored.state_dict_metadata if path.startswith(start)}
    return [p for p in tensors if p.startswith(start) and p.split("/")[2] not in present] if present else []


def _differences(tensors: Mapping[str, Tensor], stored: Metadata, folder: Path) -> list[Violation]:
    have = {path: tuple(t.shape) for path, t in tensors.items()}
    saved = {p: tuple(m.size) for p, m in stored.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    found = [f"{p} is {have[p]} here, {saved[p]} there" for p in have if p in saved and have[p] != saved[p]]
    found += [f"{p} is missing there" for p in have if p not in saved]
    found += [f"{p} is missing here" for p in saved if p not in have]
    if not found:
        return []
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    message = f"the model or its optimizer is not that of {folder.parent.name}: {shown}. Nothing was loaded."
    return [Violation(message, "model", len(found))]


class SafeReader(FileSystemReader):
    """DCP's reader without its pickles: metadata through an allow-list, tensors only, files of its own folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _AllowList(io.BytesIO(path.read_bytes())).load()
        except RunError as error:
            raise RunError(f"{path} {error} Nothing of it was run.", field=".metadata", given=str(path)) from None
        except FileNotFoundError:
            raise RunError(f"{path} is missing.", field=".metadata") from None
        except Exception as error:  # a pickle is a program: a broken one may fail in any way
            raise RunError(f"{path} is not DCP's metadata: {error}.", field=".metadata", given=str(path)) from error
        problem = _suspicious(metadata)
        if problem:
            raise RunError(f"{path} {problem}. Nothing was loaded.", field=".metadata", given=str(path))
        metadata.storage_meta = None
        return metadata


def _suspicious(metadata: Any) -> str | None:
    if not (isinstance(metadata, Metadata) and isinstance(metadata.storage_data, dict)):
        return f"holds a {type(metadata).__name__}, not DCP's metadata"
    for path, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            return f"says that {path} is a pickled object; only tensors are read"
    for info in metadata.storage_data.values():
        if not _FILE.fullmatch(str(info.relative_path)) or getattr(info, "transform_descriptors", None):
            return f"points to {info.relative_path!r}, which is no file of this checkpoint"
    return None


class _AllowList(pickle._Unpickler):  # the one in Python: C's has no place to look at what BUILD changes
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """BUILD sets attributes: of a data class's instance, which the pickle made; never of a class, which is ours."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or not hasattr(type(target), "__dataclass_fields__"):
            raise RunError("sets attributes of what is no part of a checkpoint's metadata.", field=".metadata")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise RunError(f"asks for {module}.{name}, which no checkpoint's metadata needs.", field=".metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise RunError("refers to an object outside of it.", field=".metadata")


def _member(kind: Any, name: Any) -> Any:
    """An enumeration's member, and nothing else that `getattr` could get: Python 3.11.0 to 3.11.3 pickle it that way."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind[name]
    raise RunError("asks for builtins.getattr, which no checkpoint's metadata needs for that.", field=".metadata")


class _Hashing(FileSystem):
    """The file system that DCP writes through; it hashes what passes, so that nothing is read back for it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            yield hashing  # type: ignore[misc]
            if hashing.fault is not None:  # torch.save reports a failed write as something else, or not at all
                raise hashing.fault
            self.written[Path(path).name] = (hashing.size, hashing.digest.hexdigest())


class _HashingStream:
    def __init__(self, stream: Any) -> None:
        self._stream, self.size, self.digest = stream, 0, sha256()
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.fault = error
            raise
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.fault = error
            raise

    def fileno(self) -> int:
        self.flush()  # DCP syncs the descriptor: what is still in Python's buffer would not be
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_one_error() -> Iterator[None]:
    """DCP gathers what went wrong on all ranks in one BaseException; the first cause that says more is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is uninitialized, assuming a single process": intended
            yield
    except CheckpointException as error:
        failures = [cause for cause, _ in error.failures.values()]
        first = next((e for f in failures if (e := disk_error(f)) is not None), failures[0])
        raise first from None


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that an exception is, or was caused by."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
            return error
        error = error.__cause__ or error.__context__
    return None


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any tensor is spread over ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())
