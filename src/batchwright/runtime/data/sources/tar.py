"""Tar shards as WebDataset writes them: files with the same name up to the first dot are one row."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from batchwright.core.errors import PlanError, RunError

from .access import Access, shown
from .index import IndexedSource, RowIndex
from .source import Place
from .store import Store

# WebDataset's rules: the key ends at the first dot of the file's name, the rest is the field; `__meta__/…` is no row.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_BLOCK = 512
_AHEAD = 8 * 1024 * 1024


class TarShards(IndexedSource):
    """Tar files in WebDataset's layout, as one source; a row is `{"__key__": name, "jpg": bytes, "cls": bytes, …}`.

        rows = TarShards([f"s3://bucket/train-{i:04}.tar" for i in range(64)])

    Neighbouring files `000017.jpg` and `000017.cls` are one row. As in WebDataset, folders, names without a dot, names that
    begin with a dot and `__meta__/…` are left out, and a field is in lower case. The first use goes through each file once,
    to find its rows; the index is kept as that of `JsonLines`. Fields are bytes: decode them in `collate` or in a dataset
    around this one.
    """

    _kind = "tar 2"  # another number when other files are rows: a stored index of the old rule must not be used

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        index_folder: str | Path | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(path, index_folder, access)

    def _build(self, url: str, size: int) -> RowIndex:
        return _build(self._store, url, size)

    def _decode(self, body: bytes, place: Place) -> dict[str, Any]:
        try:
            with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as tar:
                rows = list(_samples(tar))
                if len(rows) != 1:
                    raise tarfile.ReadError(f"{len(rows)} rows where the index has one")
                key, members = rows[0]
                fields = {name: _content(tar, member) for name, member in members}
        except (tarfile.TarError, EOFError) as error:
            start, end = self._span(place)
            raise RunError(
                f"{shown(self.files[place.file])}, bytes {start:,} to {end:,} (row {place.number:,}) is not valid tar: {error}.",
                field="path",
            ) from error
        return {"__key__": key, **fields}


def _build(store: Store, url: str, size: int) -> RowIndex:
    bounds: list[int] = []
    end = 0
    # Short files are read in passing, long ones are skipped.
    with io.BufferedReader(store.file(url, size, "the index of its rows"), _AHEAD) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                if {"path", "size"} & set(tar.pax_headers):
                    raise tarfile.ReadError("names or sizes are set for the whole archive, which is not supported")
                for key, members in _samples(tar):
                    names = [name for name, _ in members]
                    if len(set(names)) != len(names):
                        raise tarfile.ReadError(f"{key} has a field twice: {', '.join(names)}")
                    bounds.append(members[0][1].offset)
                    last = members[-1][1]
                    end = last.offset_data + -(-last.size // _BLOCK) * _BLOCK
                    cast(Any, tar).members = []  # tarfile would keep every member
                # tarfile takes a damaged or missing header for the end; the real end is a block of zeros.
                file.seek(int(cast(Any, tar).offset))
                if file.read(_BLOCK) != bytes(_BLOCK):
                    raise tarfile.ReadError(
                        f"after byte {cast(Any, tar).offset:,} it is damaged, or it is not complete"
                    )
        except (tarfile.TarError, EOFError) as error:
            raise PlanError(
                f"{shown(url)} cannot be read as an uncompressed tar file: {error}. A compressed one cannot be read row by row: "
                "unpack it once.",
                field="path",
                given=shown(url),
            ) from error
    return RowIndex(np.array([*bounds, end], np.int64), np.empty(0, np.int64))


def _samples(tar: Iterable[tarfile.TarInfo]) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """Neighbouring files with the same key, with the field of each."""
    held: list[tuple[str, tarfile.TarInfo]] = []
    key = ""
    for member in tar:
        match = _NAME.fullmatch(member.name)
        if not member.isreg() or match is None or _META.match(member.name):
            continue
        if held and match[1] != key:
            yield key, held
            held = []
        key = match[1]
        held.append((match[2].lower(), member))
    if held:
        yield key, held


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    body = file.read() if file is not None else b""
    if len(body) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(body):,} of {member.size:,} bytes")
    return body
