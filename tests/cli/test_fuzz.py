"""Anything a user types: no traceback, no long wait, exit code 0 or 2."""

from __future__ import annotations

import json
import os
import time

import click
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchwright.cli.plan import command as plan_command
from batchwright.cli.rl import command as rl_command
from batchwright.core.batch.request import READERS
from batchwright.dialects import dialects
from tests.examples import many

fuzz = settings(deadline=None, max_examples=many(150), suppress_health_check=[HealthCheck.function_scoped_fixture])


def flags_of(command: click.Command) -> tuple[list[str], list[str]]:
    """Flags that take a value, and switches."""
    options = [p for p in command.params if isinstance(p, click.Option) and p.name != "as_json"]
    return [p.opts[0] for p in options if not p.is_flag], [p.opts[0] for p in options if p.is_flag]


FLAGS, SWITCHES = flags_of(plan_command)
FLAGS.remove("--model")  # any word is a name of the hub: tests/estimate/test_models.py
RL_FLAGS, _ = flags_of(rl_command)
KEYS = sorted({*READERS, *(key for d in dialects() for key in (*d.keys, *d.special))})

JUNK = [
    "", " ", "0", "-1", "-0", "1.5", "0.5", "1e400", "1" + "0" * 400, "9" * 5000, "-" + "9" * 5000, "nan", "NaN", "inf", "-inf",
    "Infinity", "1e-320", "1e-999", "1" + "0" * 400 + ".5", "4M", "4Mi", "4X", "4MiB", "1/8", "1/0", "0/1", "0x10", "0b1", "1_0",
    "1,000", "1,5", "٤", "½", "𝟜", "🦊", "a\nb", "\n", "\t", "\x00", "\x1b[31m", "\ud800", "true", "false", "None", "null", "~",
    "[]", "{}", "down", "up", "10%", "-5%", "101%", "1e9%", "circular", "interleaved", "inner", "accumulation", "--json", "--",
    "-", "=", "a=b", "nemo", "python", "%s", "{0}", "../..", "/", ".", "/dev/null", "999999999989", "1000000", "1000001",
]  # fmt: skip
numbers = st.integers(1, 64).map(str)
values = st.one_of(numbers, st.sampled_from(JUNK), st.text(max_size=12), st.integers().map(str), st.floats().map(str))


def check(cli, argv: list[str]) -> None:
    """Run a command line as text and as JSON, and check both."""
    argv = [word.replace("\x00", "�") for word in argv]  # an operating system passes no NUL
    start = time.process_time()
    ran = cli(*argv)
    took = time.process_time() - start
    assert ran.code in (0, 2), (argv, ran.err)
    assert "Traceback" not in ran.err
    assert "bug in batchwright" not in ran.err
    assert took < 10, argv
    if not argv or {"--json", "--", "--help", "-h"} & set(argv):
        return
    if ran.code == 2:
        assert ran.err.startswith("error: ")
        assert len(ran.err) < 20_000
    as_json = cli(*argv, "--json")
    if as_json.code != ran.code:  # the last flag took --json as its value
        assert argv[-1].startswith("-")
        return
    document = as_json.json
    assert document["schema"] == 1
    assert as_json.err == ""
    if ran.code == 2:
        error = document["error"]
        assert {"type", "message", "field", "given", "nearest"} <= set(error)
        assert error["message"]
        assert isinstance(error["nearest"], list)
    else:
        assert "error" not in document


@fuzz
@given(st.lists(st.tuples(st.sampled_from(FLAGS), values), max_size=5), st.lists(st.sampled_from(SWITCHES), max_size=2))
def test_any_value_of_any_flag(cli, given_, switches):
    check(cli, ["plan", *[word for pair in given_ for word in pair], *switches])


@fuzz
@given(st.lists(st.tuples(st.sampled_from(KEYS), values) | st.tuples(st.text(max_size=10), values), max_size=5))
def test_any_value_of_any_key(cli, given_):
    check(cli, ["plan", *[f"{key}={value}" for key, value in given_ if not key.startswith("-")]])


@fuzz
@given(
    st.lists(
        st.sampled_from(["plan", "rl", "pln", *FLAGS, *RL_FLAGS, *SWITCHES, *JUNK]) | st.text(max_size=8), max_size=7
    )
)
def test_any_arguments(cli, argv):
    check(cli, argv)


@fuzz
@given(
    st.lists(
        st.sampled_from(
            ["nemo", "--x", "--json", "--nnodes", "--nodes", "4", "a=1", "devices=2", "x.yaml", "-m", "++a=1"]
        )
    )
)
def test_any_pasted_line(cli, argv):
    check(cli, ["plan", "nemo", *argv])


@fuzz
@given(st.lists(st.tuples(st.sampled_from(RL_FLAGS), values), max_size=7))
@example([("--prompts", "999999999989"), ("--generations", "1000"), ("--updates", "7")])
@example(
    [
        ("--prompts", "999999999989"),
        ("--generations", "1"),
        ("--data-parallel-size", "7"),
        ("--updates", "999999999989"),
    ]
)
def test_any_rl(cli, given_):
    check(cli, ["rl", *[word for pair in given_ for word in pair]])


size = st.sampled_from(
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 30, 32, 60, 64, 96, 100, 128, 1000, 1024, 4096, 10_000, 2**20]
)
NAMED = {
    "--pipeline-schedule": ["gpipe", "1f1b", "interleaved", "circular", "zero-bubble"],
    "--pipeline-style": ["accumulation", "inner"],
    "--round": ["down", "up"],
    "--tolerance": ["0%", "1%", "10%", "100%"],
    "--expansion-factor": ["1", "2", "1/2", "0.25", "3", "1.5"],
}


@settings(deadline=None, max_examples=many(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.data(), st.sets(st.sampled_from(FLAGS), min_size=2, max_size=9), st.sets(st.sampled_from(SWITCHES), max_size=2)
)
def test_any_combination_of_flags_with_numbers_that_make_sense(cli, data, names, switches):
    argv = ["plan", *sorted(switches)]
    for name in sorted(names):
        argv += [name, str(data.draw(st.sampled_from(NAMED[name]) if name in NAMED else size))]
    check(cli, argv)


@pytest.mark.parametrize(
    "line",
    [
        "--micro-batch-size 999999999989 --accumulation-steps 999999999961 --pipeline-parallel 2",
        "--global-batch-size 999999999989 --data-parallel-size 7 --pipeline-parallel 100000",
        "--global-batch-size 999999999989 --devices 99999 --pipeline-parallel 99999 --pipeline-schedule circular",
        "--global-batch-size 963761198400 --max-micro-batch-size 7",
        "--global-batch-size 963761198400 --max-micro-batch-size 7 --tolerance 100% --devices 1000000",
        "--global-batch-size 999999999989 --devices 1000000 --tolerance 100% --max-micro-batch-size 1",
        "--global-batch-size 1000000 --data-parallel-size 1000000 --tolerance 100%",
        "--global-batch-size 499999 --nodes 999998 --devices-per-node 1 --tensor-parallel 2",
        "--micro-batch-size 1 --pipeline-parallel 4 --virtual-stages 2 --pipeline-group 2",
        "--micro-batch-size 1 --pipeline-parallel 100000 --virtual-stages 2 --pipeline-group 100000",
        "--micro-batch-size 999999999989 --data-parallel-size 1 --pipeline-parallel 2 --pipeline-style inner",
        "--micro-batch-size 999983 --data-parallel-size 999979 --pipeline-parallel 2 --pipeline-style inner",
        "--global-batch-size-tokens 999999999999989 --sequence-length 1",
        "--micro-batch-size 1 --hosts 999983 --expansion-factor 1/999983",
        "--micro-batch-size 1 --hosts 999983 --stored-hosts 1000000",
    ],
)
def test_large_numbers_are_answered_without_trying_each(cli, line):
    start = time.process_time()
    ran = cli("plan", *line.split())
    assert ran.code in (0, 2)
    assert "bug" not in ran.err
    assert time.process_time() - start < 15  # usually a second; trying each would take minutes


# --- files ------------------------------------------------------------------------------------------------------------

TEXTS = {
    "python tag": "global_batch_size: !!python/object/apply:os.system ['echo broken']",
    "python name": "!!python/name:os.system x",
    "unknown tag": "global_batch_size: !foo 3",
    "empty int": 'global_batch_size: !!int ""',
    "wrong bool": "global_batch_size: !!bool foo",
    "wrong time": "global_batch_size: !!timestamp foo",
    "binary": "global_batch_size: !!binary aGVsbG8=",
    "wrong binary": "global_batch_size: !!binary '***'",
    "set": "global_batch_size: !!set {a, b}",
    "pairs": "global_batch_size: !!pairs [a: 1]",
    "anchor loop": "a: &a {b: *a}\nglobal_batch_size: 8",
    "list loop": "global_batch_size: &a [*a]",
    "key loop": "&a ? *a : 1",
    "laughs": "\n".join(
        [
            "x0: &x0 [1, 1, 1]",
            *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 20)),
            "global_batch_size: *x19",
        ]
    ),
    "laughing keys": "\n".join(
        [
            "x0: &x0 {a: 1}",
            *(f"x{i}: &x{i} {{a: *x{i - 1}, b: *x{i - 1}, c: *x{i - 1}}}" for i in range(1, 15)),
            "d: *x14",
        ]
    ),
    "deep map": "{a: " * 300 + "1" + "}" * 300,
    "deep list": "global_batch_size: " + "[" * 3000 + "]" * 3000,
    "deep dashes": "- " * 3000,
    "deep indents": "\n".join(" " * i + "a:" for i in range(600)),
    "list": "- global_batch_size: 8",
    "scalar": "8",
    "nothing": "",
    "null": "null",
    "two documents": "global_batch_size: 8\n---\nglobal_batch_size: 9",
    "twice": "global_batch_size: 8\nglobal_batch_size: 9",
    "nan": "global_batch_size: .nan\ndevices: .inf",
    "hex": "global_batch_size: 0x" + "f" * 5000,
    "digits": "global_batch_size: " + "9" * 5000,
    "hex in a list": "global_batch_size: [0x" + "f" * 5000 + "]",
    "misspelt hex": "global_batch_siz: 0x" + "f" * 5000,
    "surrogate": 'global_batch_size: "\\uD800"\n"\\uD800": 1\n"global_batch_siz\\uD800": 2',
    "types": "global_batch_size: [8]\ndevices: {a: 1}\nnodes: 2020-01-01\nmicro_batch_size: true\ntensor_parallel: 1.5",
    "odd keys": "1: 2\nnull: 3\ntrue: 4\n? [a, b]\n: 5\n",
    "odd sections": "batch: 5\nworld: [1]\nloading: x\n1.5: 2",
    "empty key": '"": 1\n".": 2\n"a.": 3\n".b": 4',
    "tab": "global_batch_size:\t8\n\tdevices: 2",
    "unfinished": "a: [1, 2",
    "control": "a: \x07",
    "escape": 'global_batch_siz: "\\e[31m"',
    "many keys": "\n".join(f"key_{i}: {i}" for i in range(3000)),
    "many slips": "batch:\n" + "\n".join(f"  global_batch_size_{i}: {i}" for i in range(300)),
    "date": "global_batch_size: 2024-99-99",
    "sixty": "global_batch_size: 1:30",
}


@pytest.mark.parametrize("ending", ["yaml", "json", "toml", ""])
@pytest.mark.parametrize("name", TEXTS)
def test_wrong_files(cli, tmp_path, name, ending, capfd):
    file = tmp_path / f"file.{ending}"
    file.write_text(TEXTS[name], encoding="utf-8")
    start = time.process_time()
    ran = cli("plan", str(file), "--json")
    assert time.process_time() - start < 15  # usually a second
    assert ran.code in (0, 2), ran.out
    assert ("error" in ran.json) == (ran.code == 2)
    assert len(ran.out) < 500_000
    assert "broken" not in capfd.readouterr().out


def test_wrong_json_files(cli, tmp_path):
    for text in (
        '{"global_batch_size": NaN}',
        '{"a": 1e999}',
        '{"\\ud800": 1, "nodes": "\\ud800"}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
    ):
        file = tmp_path / "a.json"
        file.write_text(text)
        ran = cli("plan", str(file), "--json")
        assert ran.code == 2
        assert ran.json["error"]["message"]


def test_bytes_that_are_not_text(cli, tmp_path):
    for content in (
        b"\xff\xfe\x00",
        b"global_batch_size: \x80",
        b"\x00" * 100,
        os.urandom(4000),
        b"\x89PNG\r\n",
        b"x" * 2**20,
    ):
        file = tmp_path / "a.yaml"
        file.write_bytes(content)
        assert cli("plan", str(file)).code == 2


def test_paths_that_are_not_files(cli, tmp_path):
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    os.mkfifo(tmp_path / "fifo.yaml")
    for word in (
        tmp_path,
        tmp_path / "missing.yaml",
        tmp_path / "dangling.yaml",
        tmp_path / "loop.yaml",
        tmp_path / "fifo.yaml",
        "/dev/zero",
        "x" * 5000,
        "a" * 5000 + "=1",
        "x/" * 3000,
        "",
    ):
        ran = cli("plan", str(word), "--json")
        assert ran.code == 2
        assert ran.json["error"]["message"]
    assert ": no such file." in cli("plan", str(tmp_path / "missing.yaml")).err


leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(JUNK)
    | st.integers(1, 64)
)
keys = st.sampled_from([*KEYS, "batch", "world", "loading", "ramp", "nodes", "data", "trainer"]) | st.text(max_size=8)
trees = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@fuzz
@given(st.dictionaries(keys, trees, max_size=5), st.sampled_from(["json", "yaml"]))
def test_any_tree_in_a_file(cli, tmp_path, tree, ending):
    file = tmp_path / f"tree.{ending}"
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML, except a few numbers
    check(cli, ["plan", str(file)])


@fuzz
@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            ["a", ":", " ", "\n", "-", "{", "}", "[", "]", "&x", "*x", "!!int", "'", "8", "|", ">", "%", "#", "<<"]
        ),
        max_size=25,
    ).map("".join)
)
def test_any_text_in_a_file(cli, tmp_path, text):
    file = tmp_path / "text.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    check(cli, ["plan", str(file), "--global-batch-size", "8"])
