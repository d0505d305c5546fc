"""Token files: Megatron's `.bin` and `.idx`, numpy's `.npy`, and raw tokens."""

from __future__ import annotations

import io
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.core.errors import PlanError, RunError
from batchwright.rundir import atomic

from .access import Access, shown
from .source import Int64s, Place, SpanSource
from .store import Span, Stat, local_path, mapped, paths

# Megatron-core's indexed_dataset.py: nine bytes, then a version, a type and two counts.
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

Tokens = npt.NDArray[Any]


class TokenFile(SpanSource):
    """Tokens on disk, as one source; a row is a numpy array of tokens.

        TokenFile("corpus_text_document")                                    # Megatron: a row is a sequence
        TokenFile("corpus_text_document", sequence_length=4096, overlap=1)   # its tokens in windows
        TokenFile("tokens.npy")                                              # a row of a 2-D array
        TokenFile("train.bin", dtype="uint16", sequence_length=1024)         # raw tokens

    With `sequence_length`, row i has tokens `i × sequence_length` to `(i + 1) × sequence_length + overlap` of its file. Use
    `overlap=1` if the model predicts the next token within a row. Tokens at the end of a file that fill no row are left out:
    `left_out_tokens`. Local files are memory-mapped, remote ones are read in ranges. With `dtype` the file is raw; a path that
    ends with `.npy` is numpy's; any other is Megatron's, with or without `.bin` or `.idx`.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        sequence_length: int | None = None,
        overlap: int = 0,
        dtype: npt.DTypeLike | None = None,
        access: Access | None = None,
    ) -> None:
        given = paths(path)
        self.dtype = None if dtype is None else np.dtype(dtype)
        if self.dtype is None:
            given = tuple(one if one.endswith(".npy") else f"{_prefix(one)}.bin" for one in given)
        super().__init__(given, access)
        if sequence_length is not None and sequence_length < 1:
            raise PlanError(
                f"sequence_length={sequence_length} must be at least 1.",
                field="sequence_length",
                given=sequence_length,
                nearest=(1,),
            )
        if overlap < 0 or (overlap and sequence_length is None):
            raise PlanError(
                f"overlap={overlap} must be at least 0, and needs sequence_length: it adds tokens of the next row to a row.",
                field="overlap",
                given=overlap,
                nearest=(0,),
            )
        self.sequence_length = sequence_length
        self.overlap = overlap

    @property
    def left_out_tokens(self) -> int:
        """Tokens at the ends of the files that fill no row."""
        return sum(rows.left_out for rows in self._layouts)

    @property
    def document_indices(self) -> list[Int64s]:
        """For each file of Megatron: the sequences at which its documents begin, and the number of sequences."""
        return [rows.documents for rows in self._layouts if isinstance(rows, _Sequences)]

    def _watched(self) -> Sequence[str]:
        return [*self.files, *self._index_files.values()]

    @property
    def _index_files(self) -> dict[int, str]:
        if self.dtype is not None:
            return {}
        return {i: f"{_prefix(one)}.idx" for i, one in enumerate(self.files) if not one.endswith(".npy")}

    @cached_property
    def _layouts(self) -> list[_Layout]:
        stats = dict(zip(self._watched(), self._stats, strict=True))
        return [self._layout(i, url, stats) for i, url in enumerate(self.files)]

    def _layout(self, file: int, url: str, stats: dict[str, Stat]) -> _Layout:
        size = stats[url].size
        if file in self._index_files:
            found = self._megatron(url, size, self._index_files[file], stats[self._index_files[file]].size)
            return found if self.sequence_length is None else self._windows(url, found.dtype, 0, found.tokens(url))
        if self.dtype is None:
            return self._numpy(url, size)
        if self.dtype.hasobject or not self.dtype.itemsize:
            raise PlanError(f"dtype={self.dtype} is not a type of tokens.", field="dtype", given=str(self.dtype))
        if size % self.dtype.itemsize:
            raise PlanError(
                f"{shown(url)} has {size:,} bytes, which is not a whole number of tokens of dtype={self.dtype}: {size:,} / "
                f"{self.dtype.itemsize} = {size / self.dtype.itemsize:,.2f}. The file is not complete, or dtype is another one.",
                field="dtype",
                given=str(self.dtype),
            )
        return self._windows(url, self.dtype, 0, size // self.dtype.itemsize)

    def _windows(self, url: str, dtype: np.dtype[Any], offset: int, tokens: int) -> _Windows:
        if self.sequence_length is None:
            raise PlanError(
                f"{shown(url)} has {tokens:,} tokens in one line: sequence_length says how many of them are a row.",
                field="sequence_length",
            )
        rows = max(0, (tokens - self.overlap) // self.sequence_length)
        left_out = tokens - rows * self.sequence_length - (self.overlap if rows else 0)
        return _Windows(dtype, rows, left_out, (), offset, self.sequence_length, self.overlap)

    def _numpy(self, url: str, size: int) -> _Layout:
        try:
            shape, fortran, dtype, offset = _numpy_header(self._head(url, size, 4096))
        except ValueError:  # a header can be longer
            try:
                shape, fortran, dtype, offset = _numpy_header(self._head(url, size, 1 << 20))
            except ValueError as error:
                raise PlanError(
                    f"{shown(url)} is not a .npy file that can be read: {error}.", field="path", given=shown(url)
                ) from error
        expected = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
        if dtype.hasobject or fortran or not shape or size != expected:
            why = (
                "it holds Python objects" if dtype.hasobject
                else "it is in Fortran order: save it with numpy.ascontiguousarray" if fortran
                else "it holds a single number" if not shape
                else f"it has {size:,} bytes, and shape {shape} of {dtype} needs {expected:,}"
            )  # fmt: skip
            raise PlanError(f"{shown(url)} cannot be read row by row: {why}.", field="path", given=shown(url))
        if self.sequence_length is not None or len(shape) == 1:
            return self._windows(url, dtype, offset, int(np.prod(shape, dtype=object)))
        return _Windows(dtype, shape[0], 0, shape[1:], offset, int(np.prod(shape[1:], dtype=object)), 0)

    def _head(self, url: str, size: int, length: int) -> bytes:
        return self._store.read([Span(url, 0, min(size, length), "its header")])[0]

    def _megatron(self, url: str, size: int, index_url: str, index_size: int) -> _Sequences:
        local = local_path(index_url)
        if local is not None and index_size:
            body = _map(local)
        else:
            body = np.frombuffer(self._store.read([Span(index_url, 0, index_size, "the index")])[0], np.uint8)
        problem = "it has no complete header"
        if len(body) >= _HEAD.size:
            magic, version, code, sequences, documents = _HEAD.unpack(body[: _HEAD.size].tobytes())
            shortest = _HEAD.size + 12 * sequences + 8 * documents
            if magic != _MAGIC:
                problem = f"it begins with {magic!r} instead of {_MAGIC!r}"
            elif version != 1 or code not in _TYPES:
                problem = f"version {version} (known: 1) or token type {code} (known: 1 to 8) is unknown"
            elif index_size not in (shortest, shortest + sequences):  # with a mode per sequence
                problem = (
                    f"{sequences:,} sequences and {documents:,} document entries need {_HEAD.size} + 12 × {sequences:,} + 8 × "
                    f"{documents:,} = {shortest:,} bytes (with modes {shortest + sequences:,}), and it has {index_size:,}"
                )
            else:
                lengths = np.frombuffer(body, "<i4", sequences, _HEAD.size)
                pointers = np.frombuffer(body, "<i8", sequences, _HEAD.size + 4 * sequences)
                starts = np.frombuffer(body, "<i8", documents, _HEAD.size + 12 * sequences)
                dtype = np.dtype(_TYPES[code])
                end = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
                if end == size:
                    return _Sequences(dtype, sequences, 0, (), pointers, lengths, starts)
                problem = f"its last sequence ends at byte {end:,}, and {shown(url)} has {size:,}: one of them is not complete"
        raise PlanError(
            f"{shown(index_url)} is not an index of Megatron for {shown(url)}: {problem}.",
            field="path",
            given=shown(index_url),
        )

    def _count(self, file: int) -> int:
        return self._layouts[file].rows

    def _span(self, place: Place) -> tuple[int, int]:
        return self._layouts[place.file].span(place.row)

    def _decode(self, body: bytes, place: Place) -> Tokens:
        layout = self._layouts[place.file]
        return layout.shaped(np.frombuffer(body, layout.dtype).copy())

    @cached_property
    def _maps(self) -> dict[int, Tokens]:
        """Local files, memory-mapped. An empty file cannot be mapped."""
        local = {i: local_path(url) for i, url in enumerate(self.files)}
        return {i: _map(path) for i, path in local.items() if path and self._stats[i].size}

    def _rows(self, places: Sequence[Place]) -> list[Tokens]:
        # Memory-mapped rows need no request. A copy, so that a row can be written to and does not hold the file.
        remote = [place for place in places if place.file not in self._maps]
        read = iter(super()._rows(remote) if remote else ())
        return [next(read) if place.file not in self._maps else self._mapped(place) for place in places]

    def _mapped(self, place: Place) -> Tokens:
        layout = self._layouts[place.file]
        start, end = layout.span(place.row)
        body = self._maps[place.file][start:end].tobytes() if 0 <= start <= end else b""
        if len(body) != end - start:
            url = shown(self.files[place.file])
            raise RunError(
                f"row {place.number:,} of {url} is said to be at bytes {start:,} to {end:,}, and the file has "
                f"{self._stats[place.file].size:,}: the index is damaged.",
                field="path",
            )
        return layout.shaped(np.frombuffer(body, layout.dtype).copy())


@dataclass(frozen=True)
class _Layout(ABC):
    """Where the rows of one file are."""

    dtype: np.dtype[Any]
    rows: int
    left_out: int
    shape: tuple[int, ...]

    @abstractmethod
    def span(self, row: int) -> tuple[int, int]:
        """The bytes of a row."""

    def shaped(self, tokens: Tokens) -> Tokens:
        """A row in its shape: that of an array with more than two dimensions."""
        return tokens.reshape(self.shape) if len(self.shape) > 1 else tokens


@dataclass(frozen=True)
class _Windows(_Layout):
    """Rows of one length, one after the other."""

    offset: int
    length: int
    overlap: int

    def span(self, row: int) -> tuple[int, int]:
        start = self.offset + row * self.length * self.dtype.itemsize
        return start, start + (self.length + self.overlap) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Sequences(_Layout):
    """Rows of Megatron's index."""

    pointers: Int64s
    lengths: npt.NDArray[np.int32]
    documents: Int64s

    def span(self, row: int) -> tuple[int, int]:
        start = int(self.pointers[row])
        return start, start + int(self.lengths[row]) * self.dtype.itemsize

    def tokens(self, url: str) -> int:
        """Number of tokens, if the sequences follow each other without gaps."""
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        if self.rows and (self.pointers[0] or not np.array_equal(ends[:-1], self.pointers[1:])):
            raise PlanError(
                f"the sequences of {shown(url)} do not follow each other, so it cannot be cut into rows of sequence_length. "
                "Leave sequence_length out: a row is then a sequence.",
                field="sequence_length",
            )
        return int(self.lengths.sum(dtype=np.int64))


def _map(path: str) -> npt.NDArray[np.uint8]:
    with open(path, "rb", opener=atomic.regular) as file:
        if not os.fstat(file.fileno()).st_size:
            raise RunError(f"{path} has become empty since it was opened.", field="path", given=path)
        return mapped(file)


def _prefix(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx")


def _numpy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran order, type and length of the header. Python objects are never unpickled."""
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its version {version} is unknown (known: 1.0 and 2.0)")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype, file.tell()
