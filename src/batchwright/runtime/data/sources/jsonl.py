"""JSON lines: a row is a line, found through an index of line starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.core.errors import PlanError, RunError

from .access import Access, shown
from .index import IndexedSource, RowIndex
from .source import Int64s, Place
from .store import Span, Store

_CHUNK = 8 * 1024 * 1024
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
# What the first bytes of a file say about lines that cannot be found in it.
_OTHER = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PAR1": "a Parquet file",
}


class JsonLines(IndexedSource):
    """Files with one JSON value per line, as one source; a row is what `parse` makes of the bytes of a line.

        rows = JsonLines("s3://bucket/train.jsonl")
        rows[17]

    Lines end with `\\n` or `\\r\\n`; the last one may end without. Blank lines and a byte order mark are no rows. The first
    use reads each file once, to find its lines. The index is kept beside the file or in `index_folder`, and is built anew
    when size and time (local) or etag (remote) have changed.
    """

    _kind = "jsonl"

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        parse: Callable[[bytes], Any] = json.loads,
        index_folder: str | Path | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(path, index_folder, access)
        self.parse = parse

    def _build(self, url: str, size: int) -> RowIndex:
        return _build(self._store, url, size)

    def _decode(self, body: bytes, place: Place) -> Any:
        line = body.strip(_BLANK)
        try:
            return self.parse(line)
        except (ValueError, RecursionError) as error:
            index = self._indexes[place.file]
            start = int(index.bounds[place.row]) + len(body) - len(body.lstrip(_BLANK))
            number = place.row + 1 + int(np.searchsorted(index.extra, place.row, side="right"))
            at = ""
            if isinstance(error, json.JSONDecodeError):
                at = f", at byte {start + len(error.doc[: error.pos].encode('utf-8', 'surrogatepass')):,}"
            elif isinstance(error, UnicodeDecodeError):
                at = f", at byte {start + error.start:,}"
            raise RunError(
                f"{shown(self.files[place.file])}, line {number:,} (bytes {start:,} to {start + len(line):,}, row "
                f"{place.number:,}) is not valid JSON{at}: {error}. It begins with {line[:60]!r}.",
                field="path",
            ) from error


def _build(store: Store, url: str, size: int) -> RowIndex:
    """Find the lines that are not blank, in one pass.

    `bounds` has the start of each row and the end of the file, so that blank lines belong to the row before them. `extra`
    has, for each blank line, the number of the row that follows it: with it, a row knows its line.
    """
    starts: list[Int64s] = []
    blanks: list[int] = []
    rows = 0
    line_start, blank = 0, True  # of the line that a chunk begins in: where it starts, and whether all of it was blank
    for at in range(0, size, _CHUNK):
        chunk = store.read([Span(url, at, min(at + _CHUNK, size), "the index of its lines")])[0]
        if at == 0:
            _refuse_other(url, chunk)
            if chunk.startswith(_BOM):
                line_start = len(_BOM)
                chunk = b"   " + chunk[len(_BOM) :]
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10).astype(np.int64)
        if not len(ends):
            blank = blank and not chunk.strip(_BLANK)
            continue
        begins = np.concatenate(([0], ends[:-1] + 1))  # in this chunk; the first line may have begun before it
        # A line whose first byte is not blank is a row. The few others are looked at one by one.
        first = np.frombuffer(chunk, np.uint8)[begins]
        kept = ~np.isin(first, np.frombuffer(_BLANK, np.uint8))
        for i in np.flatnonzero(~kept):
            kept[i] = bool(chunk[begins[i] : ends[i]].strip(_BLANK))
        kept[0] = kept[0] or not blank
        numbers = rows + np.cumsum(kept) - kept  # for each line, the rows before it
        blanks += numbers[~kept].tolist()
        begins = begins + at
        begins[0] = line_start
        starts.append(begins[kept])
        rows += int(kept.sum())
        line_start = at + int(ends[-1]) + 1
        blank = not chunk[int(ends[-1]) + 1 :].strip(_BLANK)
    if not blank:  # the last line has no end
        starts.append(np.array([line_start], np.int64))
    return RowIndex(np.concatenate([*starts, np.array([size], np.int64)]), np.array(blanks, np.int64))


def _refuse_other(url: str, head: bytes) -> None:
    for magic, what in _OTHER.items():
        if head.startswith(magic):
            raise PlanError(
                f"{shown(url)} is {what}, so its lines cannot be read one by one. Convert it once to plain UTF-8 lines"
                f"{' or read it with Parquet' if magic == b'PAR1' else ''}.",
                field="path",
                given=shown(url),
            )
