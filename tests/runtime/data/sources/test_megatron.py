"""Files that megatron-core writes, read by TokenFile and by megatron-core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchwright.runtime import TokenFile
from tests.needs import needs
from tests.runtime.data.sources import made

# Megatron's own writer and reader, in a process of their own: they import much and warn.
WRITE = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
folder, name, modes = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
draw = numpy.random.default_rng(5)
prefix = f"{folder}/{name}"
builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(numpy, name), multimodal=modes)
for document in range(20):
    for part in range(document % 3 + 1):
        tokens = torch.from_numpy(draw.integers(0, 100, draw.integers(0, 40)))
        builder.add_item(tokens, *([part] if modes else []))
    builder.end_document()
builder.finalize(f"{prefix}.idx")
read = IndexedDataset(prefix, multimodal=modes)
rows = [(read[i][0] if modes else read[i]) for i in range(len(read))]
numpy.savez(f"{prefix}.npz", documents=read.document_indices, **{f"r{i:04}": row for i, row in enumerate(rows)})
"""


@pytest.mark.rounds
@pytest.mark.parametrize(("name", "modes"), [("uint16", False), ("int32", False), ("uint8", False), ("int32", True)])
def test_rows_are_those_of_megatron(name, modes, tmp_path):
    needs("megatron.core")
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITE, tmp_path, name, str(modes)], check=True, timeout=300)
    with np.load(tmp_path / f"{name}.npz") as stored:
        documents, rows = stored["documents"], [stored[key] for key in sorted(stored.files) if key != "documents"]
    source = TokenFile(tmp_path / name)
    assert len(source) == len(rows) == 39
    for ours, theirs in zip(source, rows, strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert source.document_indices[0].tolist() == documents.tolist()
    code = {"uint8": 1, "int32": 4, "uint16": 8}[name]
    bin_, idx = made.megatron(rows, code, documents.tolist())
    # The layout that the other tests write is the real one; modes follow at the end.
    assert Path(f"{source.files[0]}").read_bytes() == bin_
    stored = (tmp_path / f"{name}.idx").read_bytes()
    assert stored[: len(idx)] == idx and len(stored) - len(idx) == (39 if modes else 0)


@pytest.mark.parametrize(("code", "dtype"), [*enumerate(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"], start=1)])
def test_every_type_of_token(code, dtype, tmp_path):
    sequences = [np.arange(i, dtype=dtype) for i in (3, 0, 5)]
    for name, body in zip(("m.bin", "m.idx"), made.megatron(sequences, code, modes=b"\1\0\2"), strict=True):
        (tmp_path / name).write_bytes(body)
    rows = list(TokenFile(tmp_path / "m"))
    assert [(r.dtype, r.tolist()) for r in rows] == [(s.dtype, s.tolist()) for s in sequences]
