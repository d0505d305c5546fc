"""Tensors on disk: torch.distributed.checkpoint (DCP) without pickled objects.

The states of a model and its optimizers are nested dicts. They are split into two flat ones: `path -> tensor`, which DCP
stores and reshards over any number of ranks, and `path -> number, text, flag`, which is JSON. DCP's metadata is a pickle:
it is read through an allow-list of inert classes. Tensors are read with `weights_only`. A checkpoint from an untrusted
source may hold wrong numbers or use up the memory, but it cannot run code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar, cast, get_origin

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from batchwright.core.errors import RunError, Violation, raise_violations
from batchwright.runtime.device import pins, synchronise
from batchwright.runtime.stages import Stages

_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
# Every name in DCP's metadata of plain tensors (torch 2.6 to 2.13), beside torch.<dtype>. Python 3.11.0 to 3.11.3 write a
# member of an enumeration as a call of getattr.
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _RECORDS),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("builtins", "getattr"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
}
_FILE = re.compile(r"__\d+_\d+\.distcp")
T = TypeVar("T")
# torch's annotations of these two are incomplete.
_dcp_load, _dcp_save = cast(Any, state_dict_loader).load, cast(Any, state_dict_saver).save


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
                f"{path} of type {type(value).__name__} cannot be saved: a checkpoint holds tensors and JSON values. "
                "Keep it out of state_dict(), or turn it into tensors, numbers or text.",
                field=path,
                given=type(value).__name__,
            )
    return tensors, rest


def join(
    model: nn.Module, optimizers: tuple[Optimizer, ...], tensors: dict[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """The inverse of `split`: put the loaded values into the model and its optimizers.

    Tensors that `load` removed belong to parameters that never had a gradient: the optimizer keeps no state of those.
    """
    whole = _whole(model, optimizers)
    known = dict(_leaves(whole))
    unused = {p.split("/")[2] for p, value in known.items() if isinstance(value, Tensor) and p not in tensors}
    loaded = _rebuilt(whole, "", tensors, rest)
    groups = loaded["optimizer"].get("param_groups", [])
    if isinstance(model, Stages):  # which parameters a group has is known here, and differs between stages
        for group, own in zip(groups, whole["optimizer"]["param_groups"], strict=True):
            group["params"] = own["params"]
    # An option that a fresh optimizer does not have yet, such as `initial_lr`.
    for path in rest.keys() - known.keys():
        owner, *inner = path.split("/")
        if owner == "optimizer" and inner[:1] == ["param_groups"]:
            if int(inner[1]) >= len(groups):
                raise RunError(
                    f"the optimizer has {len(groups)} parameter groups, and the checkpoint has more. Nothing was loaded. "
                    "Build the optimizer with the same groups.",
                    field="optimizer",
                    given=len(groups),
                )
            groups[int(inner[1])][inner[2]] = rest[path]
    if isinstance(model, Stages):
        loaded = model.renamed(loaded, back=True)
        groups = loaded["optimizer"]["param_groups"]
        unused = {own for own, full in model.full_names.items() if full in unused}
    set_state_dict(model, optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    own = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    for (optimizer, group), named in zip(own, groups, strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            if name in unused:
                optimizer.state.pop(parameter, None)


def _whole(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, Any]:
    of_model, of_optimizers = get_state_dict(model, optimizers)
    whole = {"model": of_model, "optimizer": of_optimizers}
    return model.renamed(whole) if isinstance(model, Stages) else whole


def _members(value: Any, path: str) -> list[tuple[Any, str, Any]] | None:
    """(key, path, value) of each member of a mapping, or of a list that holds more than plain values; None for a leaf."""
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        return [(key, f"{path}/{key}" if path else str(key), inner) for key, inner in mapping.items()]
    inside = cast(list[Any], value) if isinstance(value, list) else []
    if any(isinstance(inner, (Mapping, Tensor, list)) for inner in inside):
        return [(index, f"{path}/{index}", inner) for index, inner in enumerate(inside)]
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    members = _members(value, path)
    if members is None:
        yield path, value
    for _, at, inner in members or ():
        yield from _leaves(inner, at)


def _rebuilt(value: Any, path: str, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Any:
    members = _members(value, path)
    if members is not None:
        made = {key: _rebuilt(inner, at, tensors, rest) for key, at, inner in members}
        return list(made.values()) if isinstance(value, list) else made
    if isinstance(value, Tensor):
        return tensors.get(path, value)
    saved = rest.get(path, value)
    return tuple(cast(list[Any], saved)) if isinstance(value, tuple) and isinstance(saved, list) else saved


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(inner) for inner in cast(tuple[Any, ...], value))
    return value is None or isinstance(value, (str, bool, int, float))


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, which training does not change. Those of a device are waited for once, at the end."""
    copies = {path: _copied(tensor.detach()) for path, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values()}:
        synchronise(device)
    return copies


def _copied(tensor: Tensor) -> Tensor:
    # Moving a tensor that is already on the CPU would not copy it. A copy that does not wait goes to pinned memory.
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=pins(tensor.device))


def save(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> dict[str, tuple[int, str]]:
    """Store tensors with the ranks of `group`; returns the size and SHA-256 of each file that this rank wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(folder, overwrite=False)
    writer.fs = files = _Hashing()
    with _as_one_error():
        _dcp_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    return {name.removesuffix(".tmp"): fact for name, fact in files.written.items()}


def load(
    tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None, elsewhere: Collection[str] = ()
) -> None:
    """Fill `tensors`, sharded or not, in place; first compare their names and shapes with the stored ones.

    `elsewhere`: the names of tensors that other stages of a pipeline load.

    The optimizer's state of a parameter that had no gradient before the save is removed from `tensors`.
    """
    reader = SafeReader(folder)
    stored = reader.read_metadata()
    for path in _never_stepped(tensors, stored):
        del tensors[path]
    raise_violations(RunError, _differences(tensors, stored, folder, elsewhere))
    try:
        with _as_one_error():
            _dcp_load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except Exception as error:
        # Errors of reading are raised `from None`; any other comes from the group: another rank died.
        if not error.__suppress_context__ or isinstance(error, RunError):
            raise
        lines = [f"{type(error).__name__}: {error}", *str(error).splitlines()]
        reason = next((line for line in lines if "GLOBAL" in line), lines[0].splitlines()[0])
        raise RunError(
            f"the tensors in {folder} cannot be read: {reason} No code of them was run, but the model may hold some of "
            "them: do not train it.",
            field="tensors",
            given=str(folder),
        ) from error


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, in this process: to inspect one without its model."""
    stored = cast(dict[str, TensorStorageMetadata], SafeReader(folder).read_metadata().state_dict_metadata)
    tensors = {path: torch.empty(item.size, dtype=item.properties.dtype) for path, item in stored.items()}
    load(tensors, folder, None)
    return tensors


def _never_stepped(tensors: Mapping[str, Tensor], stored: Metadata) -> list[str]:
    """Paths of parameters whose optimizer state was not saved, where that of other parameters was.

    An optimizer creates a parameter's state at its first gradient. DCP creates it for all parameters, to load into it.
    """
    start = "optimizer/state/"
    present = {path.split("/")[2] for path in stored.state_dict_metadata if path.startswith(start)}
    return [p for p in tensors if p.startswith(start) and p.split("/")[2] not in present] if present else []


def _differences(
    tensors: Mapping[str, Tensor], stored: Metadata, folder: Path, elsewhere: Collection[str]
) -> list[Violation]:
    have = {path: tuple(t.shape) for path, t in tensors.items()}
    saved = {p: tuple(m.size) for p, m in stored.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    found = [f"{p} is {have[p]} here, {saved[p]} there" for p in have if p in saved and have[p] != saved[p]]
    found += [f"{p} is missing there" for p in have if p not in saved]
    found += [f"{p} is missing here" for p in saved if p not in have and p not in elsewhere]
    if not found:
        return []
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    message = f"the model or its optimizer does not match {folder.parent.name}: {shown}. Nothing was loaded."
    return [Violation(message, "model", len(found))]


class SafeReader(FileSystemReader):
    """DCP's reader, but its metadata is read through an allow-list, and only tensors in files of its folder are read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of a checkpoint that holds nothing but tensors; a RunError for any other file."""
        path = Path(cast(Any, self).path) / ".metadata"
        try:
            return _metadata(_InertUnpickler(io.BytesIO(path.read_bytes())).load())
        except RunError as error:
            reason = f"{path} {error} Nothing was loaded, and no code of it was run."
            raise RunError(reason, field=".metadata", given=str(path)) from None
        except FileNotFoundError:
            raise RunError(f"{path} is missing.", field=".metadata") from None
        except Exception as error:  # a pickle is a program: a broken one may fail in any way
            raise RunError(f"{path} is not DCP's metadata: {error}.", field=".metadata", given=str(path)) from error


class _Inert:
    """Replaces each class and function that a pickle names: keeps its arguments and its state, and does nothing.

    A pickle may call what it names (REDUCE) and set attributes of it (BUILD). Each load makes its own subclasses, so that
    nothing a pickle can reach is shared with this process.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Inert:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:  # called without an instance, so refused, where BUILD gets a class
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(dtype := vars(torch).get(global_name), torch.dtype):
            return dtype
        if (module_name, global_name) in _ALLOWED:
            return type(global_name, (_Inert,), {})
        raise RunError(f"asks for {module_name}.{global_name}, which the metadata of tensors does not need.")


def _metadata(found: Any) -> Metadata:
    """torch's records from the pickle's inert ones: the fields that loading needs, each of the type it must have."""
    whole = _fields(found, "Metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for path, value in _of(dict[Any, Any], whole["state_dict_metadata"]).items():
        tensor = _fields(value, "TensorStorageMetadata")
        chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _of(list[Any], tensor["chunks"])]
        tensors[_of(str, path)] = TensorStorageMetadata(
            TensorProperties(dtype=_of(torch.dtype, _state(tensor["properties"], "TensorProperties")[0])),
            _size(tensor["size"]),
            [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
        )
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in _of(dict[Any, Any], whole["storage_data"]).items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        file = _of(str, info["relative_path"])
        if not _FILE.fullmatch(file) or info.get("transform_descriptors"):
            raise RunError(f"points to {file!r}, which is not a file of tensors in this checkpoint.")
        offset, hint = index.get("offset"), index.get("index")
        place = MetadataIndex(
            _of(str, index["fqn"]), None if offset is None else _size(offset), None if hint is None else _of(int, hint)
        )
        storage[place] = _StorageInfo(file, _of(int, info["offset"]), _of(int, info["length"]))
    return Metadata(tensors, storage_data=storage)


def _state(value: Any, kind: str) -> Any:
    if not isinstance(value, _Inert) or type(value).__name__ != kind:
        raise RunError(f"holds {_kind(value)} where {kind} is expected.")
    return value.state


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _of(dict[str, Any], _state(value, kind))


def _size(value: Any) -> torch.Size:
    _state(value, "Size")
    (numbers,) = value.args
    return torch.Size([_of(int, number) for number in _of(tuple[Any, ...], numbers)])


def _of(kind: type[T], value: Any) -> T:
    plain: type[T] = get_origin(kind) or kind
    if not isinstance(value, plain):
        raise RunError(f"holds {_kind(value)} where {plain.__name__} is expected.")
    return value


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


class _Hashing(FileSystem):
    """The file system that DCP writes through. It hashes the bytes on the way, so that no file is read again for that."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with Path(path).open(mode) as stream:
            if mode != "wb":
                yield cast(io.IOBase, stream)
                return
            hashing = _HashingStream(stream)
            yield cast(io.IOBase, hashing)
            # torch.save reports a failed write as another error, or not at all.
            if hashing.fault is not None:
                raise hashing.fault
            self.written[Path(path).name] = (hashing.size, hashing.digest.hexdigest())


class _HashingStream:
    def __init__(self, stream: IO[bytes]) -> None:
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
        self.flush()  # DCP syncs the descriptor, which does not include Python's buffer
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_one_error() -> Generator[None]:
    """DCP collects the errors of all ranks in one BaseException; raise the first one, an error of the disk before others."""
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
