"""Every source gives the rows that were written, one by one and in batches, with any gap, over several files."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tarfile
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime import Access, JsonLines, Parquet, TarShards, TokenFile
from tests.runtime.data.sources import made

ROWS = [{"i": i, "text": "é" * (i % 11), "list": list(range(i % 4))} for i in range(50)]
TARS = [{"__key__": f"dir.d/{i:05}", "txt": b"y" * (i * 97 % 1300), "seg.png": b"%d" % i} for i in range(30)]
SEQUENCES = [np.arange(i, i + i % 9, dtype=np.int32) for i in range(40)]
TOKENS = np.arange(1003, dtype=np.uint16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("sources")
    for name, body in {
        "a.jsonl": made.json_lines(ROWS[:30]),
        "b.jsonl": made.json_lines(ROWS[30:]),
        "none.jsonl": b"",
        "a.parquet": made.parquet(ROWS[:30]),
        "b.parquet": made.parquet(ROWS[30:]),
        "a.tar": made.tar(TARS[:12]),
        "b.tar": made.tar(TARS[12:], tarfile.GNU_FORMAT),
        "a.npy": made.npy(TOKENS),
        "raw.bin": TOKENS.tobytes(),
        "table.npy": made.npy(TOKENS[:1000].reshape(50, 20)),
        "m.bin": made.megatron(SEQUENCES)[0],
        "m.idx": made.megatron(SEQUENCES)[1],
    }.items():
        (at / name).write_bytes(body)
    return at


def windows(length: int, overlap: int) -> list[list[int]]:
    return [TOKENS[i : i + length + overlap].tolist() for i in range(0, 1003 - length - overlap + 1, length)]


CASES = {
    "jsonl": (lambda f, a: JsonLines([f / "a.jsonl", f / "none.jsonl", f / "b.jsonl"], access=a), ROWS),
    "parquet": (lambda f, a: Parquet([f / "a.parquet", f / "b.parquet"], access=a), ROWS),
    "columns": (lambda f, a: Parquet(f / "a.parquet", columns=["i"], access=a), [{"i": i} for i in range(30)]),
    "tar": (lambda f, a: TarShards([f / "a.tar", f / "b.tar"], access=a), TARS),
    "npy": (lambda f, a: TokenFile(f / "a.npy", sequence_length=10, access=a), windows(10, 0)),
    "npy table": (lambda f, a: TokenFile(f / "table.npy", access=a), TOKENS[:1000].reshape(50, 20).tolist()),
    "raw": (
        lambda f, a: TokenFile(f / "raw.bin", dtype="uint16", sequence_length=7, overlap=1, access=a),
        windows(7, 1),
    ),
    "megatron": (lambda f, a: TokenFile(f / "m", access=a), [s.tolist() for s in SEQUENCES]),
}


def plain(rows: list) -> list:
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_the_rows_are_those_that_were_written(case, folder):
    make, rows = CASES[case]
    source = make(folder, None)
    assert len(source) == len(rows)
    assert plain([source[i] for i in range(len(source))]) == rows
    assert plain(list(source)) == rows  # a loop ends with IndexError
    assert plain([source[-1], source[np.int64(1)]]) == [rows[-1], rows[1]]
    for wrong in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match=f"{len(rows):,} rows"):
            source[wrong]
    with pytest.raises(TypeError):
        source[1.0]
    copy = pickle.loads(pickle.dumps(source))
    assert plain(copy.__getitems__(range(len(rows)))) == rows
    assert copy.reads.rows == len(rows) and type(source).__name__ in repr(source)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_batch_is_its_rows_with_any_gap(case, folder, data):
    make, rows = CASES[case]
    gap, largest = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, 4000))
    wanted = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1)))
    source = make(folder, Access(merge_gap=gap, largest_request=largest))
    assert plain(source.__getitems__(wanted)) == [rows[i] for i in wanted] == plain([source[i] for i in wanted])


def test_a_repeated_row_is_not_the_same_object(folder):
    for case in ("jsonl", "parquet", "megatron"):
        first, second = CASES[case][0](folder, None).__getitems__([7, 7])
        assert first is not second
    assert first.flags.writeable


def test_neighbours_share_a_request_and_row_groups_are_kept(folder):
    source = JsonLines(folder / "a.jsonl")
    len(source)
    before = source.reads.requests
    source.__getitems__(range(30))
    assert source.reads.requests == before + 1
    groups = Parquet(folder / "a.parquet", cached_row_groups=1)  # seven rows each
    groups.__getitems__([0, 6, 3])
    before = groups.reads.requests
    groups.__getitems__([1, 5])
    assert groups.reads.requests == before
    groups.__getitems__([29, 1])
    assert groups.reads.requests == before + 1
    groups[2]  # pushed out by row 29
    assert groups.reads.requests == before + 2
    assert groups.reads.rows == 8


def test_files_that_change_are_not_mixed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"1\n2\n")
    source = JsonLines(tmp_path / "a.jsonl")
    assert len(source) == 2
    state = pickle.dumps(source)
    (tmp_path / "a.jsonl").write_bytes(b"1\n2\n3\n")
    with pytest.raises(RunError, match=r"has changed since the source was opened: 4 bytes then .* 6 now"):
        len(pickle.loads(state))
    assert len(JsonLines(tmp_path / "a.jsonl")) == 3


MANY = """
import resource
from pathlib import Path
from batchwright.runtime import JsonLines, Parquet, TarShards, TokenFile

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
paths = {kind: [Path(f"{i}.{kind}") for i in range(300)] for kind in ("jsonl", "tar", "bin", "npy", "parquet")}
sources = {
    "jsonl": JsonLines(paths["jsonl"]),
    "tar": TarShards(paths["tar"]),
    "bin": TokenFile(paths["bin"]),
    "npy": TokenFile(paths["npy"], sequence_length=2),
    "parquet": Parquet(paths["parquet"]),
}
for name, source in sources.items():
    assert len(source) == 600 and len(source.__getitems__(range(600))) == 600, name
    for path in paths[name]:
        path.unlink()
assert [int(sources["bin"][i][0]) for i in (0, 1, 598, 599)] == [0, 1, 0, 1]  # what is mapped stays
del source, sources
maps = Path("/proc/self/maps")
assert not maps.exists() or "0.bin" not in maps.read_text()
"""


def test_more_files_than_a_process_may_have_open(tmp_path):
    body, index = made.megatron([np.array([i], "<i4") for i in range(2)])
    for i in range(300):
        (tmp_path / f"{i}.jsonl").write_bytes(made.json_lines([1, 2]))
        (tmp_path / f"{i}.tar").write_bytes(made.tar([{"__key__": "a", "b": b"c"}, {"__key__": "d", "b": b"e"}]))
        (tmp_path / f"{i}.bin").write_bytes(body)
        (tmp_path / f"{i}.idx").write_bytes(index)
        (tmp_path / f"{i}.npy").write_bytes(made.npy(np.arange(4)))
        (tmp_path / f"{i}.parquet").write_bytes(made.parquet([{"a": 1}, {"a": 2}]))
    subprocess.run([sys.executable, "-c", MANY], cwd=tmp_path, check=True)


def test_tokens_that_fill_no_row_are_counted(folder):
    assert TokenFile(folder / "a.npy", sequence_length=10).left_out_tokens == 3
    assert TokenFile(folder / "a.npy", sequence_length=10, overlap=3).left_out_tokens == 0
    assert TokenFile(folder / "a.npy", sequence_length=10, overlap=4).left_out_tokens == 9
    short = TokenFile(folder / "a.npy", sequence_length=2000)
    assert (len(short), short.left_out_tokens) == (0, 1003)
    whole = np.concatenate(SEQUENCES).tolist()
    cut = TokenFile(folder / "m.idx", sequence_length=8)
    assert np.concatenate(list(cut)).tolist() == whole[: 8 * len(cut)]
    assert len(cut) * 8 + cut.left_out_tokens == len(whole)
    assert cut.document_indices == [] and TokenFile(folder / "m").document_indices[0].tolist() == list(range(41))


@pytest.mark.parametrize(
    ("name", "body", "options", "message"),
    [
        ("a.npy", b"nothing", {}, "not a .npy file"),
        ("a.npy", made.npy(np.zeros((3, 4)))[:-1], {}, "and shape .* needs 224"),
        ("a.npy", made.npy(np.asfortranarray(np.zeros((3, 4)))), {}, "Fortran order"),
        ("a.npy", made.npy(np.zeros(3)), {}, "sequence_length says"),
        ("a.npy", made.npy(np.array([{}])), {}, "Python objects"),
        ("a.npy", made.npy(np.zeros(())), {}, "a single number"),
        ("a.bin", b"12345", {"dtype": "uint16", "sequence_length": 2}, "5 / 2 = 2.50"),
        ("a.bin", b"1234", {"dtype": "uint16", "sequence_length": 0}, "at least 1"),
        ("a.bin", b"1234", {"dtype": "uint16", "overlap": 1}, "needs sequence_length"),
        ("a.bin", b"1234", {}, r"cannot read .*a\.idx"),
        ("a.tar", b"\x1f\x8bxxxxxxxx", {}, "uncompressed tar"),
        ("a.tar", made.tar(TARS)[:700], {}, "after byte 512 it is damaged, or it is not complete"),
        ("a.tar", made.tar(TARS)[:512], {}, "after byte 512 it is damaged, or it is not complete"),
        ("a.tar", made.tar(TARS)[:5000], {}, "not complete|unexpected end"),
        ("a.tar", made.tar([{"__key__": "a", "x": b"1"}] * 2), {}, "a has a field twice"),
        ("a.parquet", b"PAR1 no PAR1", {}, "its footer.* cannot be read as Parquet"),
        ("a.parquet", made.parquet(ROWS), {"columns": ["txt"]}, "has i, text, list. Did you mean text?"),
        ("missing.jsonl", None, {}, "No such file"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, body, options, message, tmp_path):
    path = tmp_path / name
    if body is not None:
        path.write_bytes(body)
    kind = {"npy": TokenFile, "bin": TokenFile, "tar": TarShards, "parquet": Parquet, "jsonl": JsonLines}[
        name.split(".")[1]
    ]
    with pytest.raises((PlanError, RunError), match=message):
        len(kind(path, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:20], "no complete header"),
        (lambda b: b"X" + b[1:], "begins with"),
        (lambda b: b[:9] + b"\x02" + b[10:], "version 2"),
        (lambda b: b[:-1], r"34 \+ 12 × 40"),
        (lambda b: b + b"\0", r"34 \+ 12 × 40"),
        (lambda b: b[:17] + b"\x05" + b[18:], "one of them is not complete"),
    ],
)
def test_a_damaged_index_of_megatron_is_named(change, message, tmp_path):
    body, index = made.megatron(SEQUENCES)
    (tmp_path / "m.bin").write_bytes(body)
    (tmp_path / "m.idx").write_bytes(change(index))
    with pytest.raises(PlanError, match=message):
        len(TokenFile(tmp_path / "m"))


def test_columns_of_several_parquet_files_must_agree(tmp_path):
    (tmp_path / "a.parquet").write_bytes(made.parquet([{"i": 1, "j": 2}]))
    (tmp_path / "b.parquet").write_bytes(made.parquet([{"i": 1, "j": "2"}]))
    both = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(PlanError, match=r"b\.parquet has other columns than .*a\.parquet: j"):
        len(Parquet(both))
    assert list(Parquet(both, columns=["i"])) == [{"i": 1}] * 2
    with pytest.raises(PlanError, match="no files"):
        Parquet([])


def test_tar_members_that_are_no_rows_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in (
            "folder",
            "README",
            ".hidden.txt",
            "a.txt",
            "folder2",
            "a.cls",
            "b.txt",
            "LICENSE",
            "x" * 150 + ".txt",
        ):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.startswith("folder") else tarfile.REGTYPE
            file.addfile(info)
    rows = list(TarShards(tmp_path / "a.tar"))
    assert [sorted(row) for row in rows] == [["__key__", "cls", "txt"], ["__key__", "txt"], ["__key__", "txt"]]
    assert [row["__key__"] for row in rows] == ["a", "b", "x" * 150]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # WebDataset leaves its file open
def test_rows_of_tar_files_are_those_of_webdataset(tmp_path):
    expected = {
        "a.JPG": ("a", "jpg"),
        "__meta__/info.json": None,
        "a.Cls": ("a", "cls"),  # still the first row
        "__about.txt__": None,
        "dir/__meta__/c.txt": ("dir/__meta__/c", "txt"),
        "d.e/f.tar.GZ": ("d.e/f", "tar.gz"),
        "d.e/f": None,
        "g/.hidden.txt": ("g/", "hidden.txt"),
        "__h.txt": ("__h", "txt"),
        "k.": ("k", ""),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in expected:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            file.addfile(info, io.BytesIO(name.encode()))
    rows: dict[str, dict] = {}
    for name, row in expected.items():
        if row:
            rows.setdefault(row[0], {"__key__": row[0]})[row[1]] = name.encode()
    assert list(TarShards(tmp_path / "a.tar")) == list(rows.values())
    if find_spec("webdataset"):
        import webdataset

        theirs = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
        assert [{k: v for k, v in row.items() if k not in ("__url__", "__local_path__")} for row in theirs] == list(
            rows.values()
        )
