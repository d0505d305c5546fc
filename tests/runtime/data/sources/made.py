"""Files of every format with the same rows, written by the usual library of each."""

from __future__ import annotations

import io
import json
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def json_lines(rows: list) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict], row_group_size: int = 7) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=row_group_size)
    return out.getvalue()


def tar(rows: list[dict[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as file:
        for row in rows:
            for name, content in row.items():
                if name == "__key__":
                    continue
                info = tarfile.TarInfo(f"{row['__key__']}.{name}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def megatron(sequences: list[np.ndarray], code: int = 4, documents: list[int] | None = None, modes: bytes = b""):
    """The documented layout of Megatron's `.bin` and `.idx`; tests/…/test_megatron.py compares it with the real writer."""
    lengths = [len(s) for s in sequences]
    sizes = [s.nbytes for s in sequences]
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
    index += np.array(lengths, "<i4").tobytes() + np.array([0, *np.cumsum(sizes)[:-1]][: len(sizes)], "<i8").tobytes()
    return b"".join(s.tobytes() for s in sequences), index + np.array(documents, "<i8").tobytes() + modes


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
