"""Configuration files in every format, and files that are hostile."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from batchwright.cli.files import read_keys
from batchwright.cli.parse import read_text
from batchwright.core.errors import ConfigError

FORMATS = {
    "a.yaml": "data:\n  micro_batch_size: 4  # per rank\n  global_batch_size: 16\n",
    "a.yml": "data.micro_batch_size: 4\ndata.global_batch_size: 16\n",
    "a.json": '{"data": {"micro_batch_size": 4, "global_batch_size": 16}}',
    "a.toml": "[data]\nmicro_batch_size = 4\nglobal_batch_size = 16\n",
    "a.txt": "data.micro_batch_size=4\n# a comment\n++data.global_batch_size=16\n",
    "a.args": "--data.micro-batch-size 4 \\\n  --data.global_batch_size=16\n",
    "list.json": '["--data.micro-batch-size", "4", "--data.global-batch-size", 16]',
    "args.yaml": 'program: train.py\nargs: ["--data.micro-batch-size", "4", "--data.global-batch-size=16"]\n',
    "flags.yaml": "--data.micro-batch-size: 4\n--data.global-batch-size: 16\n",
    "refers.yaml": "base: {rows: 4}\ndata: {micro_batch_size: '${base.rows}', global_batch_size: '${.whole}', whole: 16}\n",
    "select.yaml": "data: {micro_batch_size: '${oc.select:gone,4}', global_batch_size: '${oc.select:n,1}'}\nn: 16\n",
    "train.sh": "OMP_NUM_THREADS=1 torchrun --nproc-per-node=4 t.py data.micro_batch_size=4 data.global_batch_size=16 --bf16",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_keys(tmp_path, name):
    file = tmp_path / name
    file.write_text(FORMATS[name])
    found = read_keys(str(file))
    assert (str(found["data.micro_batch_size"]), str(found["data.global_batch_size"])) == ("4", "16")


def test_a_command_line_in_a_file_keeps_its_launcher_and_its_switches(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(FORMATS["train.sh"])
    found = read_keys(str(file))
    assert found["nproc_per_node"] == "4" and found["bf16"] == "true" and "OMP_NUM_THREADS" not in found


def test_a_reference_that_is_not_resolved_stays_text(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: '${b}'\nb: '${a}'\nc: '${multiply:2,3}'\n")
    assert read_keys(str(file))["c"] == "${multiply:2,3}"


def nested(levels: int) -> str:
    return "a: " + "[" * levels + "]" * levels


def merged(levels: int) -> str:
    """Each level merges the one before ten times: ten to the power of the levels, in a few hundred bytes."""
    tens = (f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, levels + 1))
    return "a0: &a0 {k0: 1, k1: 1}\n" + "".join(tens)


HOSTILE = {
    "bomb.yaml": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "tag.yaml": "a: !!python/object/apply:os.system ['true']\n",
    "deep.yaml": nested(5000),
    "deep.json": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "large.yaml": "a: " + "x" * (51 * 2**20),
    "binary.yaml": "\x00\x01\x02",
    "twice.yaml": "a: 1\na: 2\n",
    "self.yaml": "a: &a [*a]\n",
    "number.yaml": "micro_batch_size: " + "9" * 5000,
    "quote.args": "--a 'not closed",
    "empty.yaml": "",
    "scalar.yaml": "5",
    "list.yaml": "[1, {a: 2}]",
    "many.json": json.dumps({str(n): n for n in range(20_000)}),
    "merge.yaml": merged(9),
    "merge_wide.yaml": f"a: &a {{{', '.join(f'k{n}: 1' for n in range(9000))}}}\nb: {{<<: [{', '.join(['*a'] * 8000)}]}}\n",
    "blank.args": "\n" * 200_000,
    "dots.toml": ".".join("a" * 120_000) + " = 1\n",
    "dots_inside.toml": "x = {" + ".".join("a" * 120_000) + " = 1}\n",
    "dots_section.toml": "[" + ".".join(["'a'"] * 60_000) + "]\n",
    "sixties.yaml": "a: " + ":".join("1" * 120_000),
}
# Files that can be read.
SLOW = {
    "spaces.yaml": "a: '${oc.env:A," + " " * 200_000 + "'\n",
    "references.yaml": "a: '${" + "." * 200_000 + "'\n",
    "settings.args": "A=1 " * 60_000,
    "settings.sh": "A=1 " * 60_000 + "python",
    "words.sh": "python " + " ".join(f"w{n}" for n in range(35_000)),
    "factories.sh": "nemo " + "--factory 'l(num_nodes=x)' " * 9000,
    "near.json": json.dumps({f"per_device_train_batch_size{n}": n for n in range(9000)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_clearly(tmp_path, name):
    file = tmp_path / name
    file.write_text(HOSTILE[name])
    with pytest.raises(ConfigError) as caught:
        read_keys(str(file))
    assert str(caught.value) and len(str(caught.value)) < 500


def limited() -> None:
    """Two seconds of CPU time, of which a bare `check` takes a tenth, and 512 MiB of addresses."""
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))


@pytest.mark.parametrize("name", HOSTILE | SLOW)
def test_a_hostile_file_takes_little_time_and_memory(tmp_path, name):
    file = tmp_path / name
    file.write_text((HOSTILE | SLOW)[name])
    ran = subprocess.run(
        [sys.executable, "-m", "batchwright", "check", str(file)], capture_output=True, text=True, preexec_fn=limited
    )
    assert ran.returncode in ((2,) if name in HOSTILE else (0, 2)), (ran.returncode, ran.stderr[-400:])
    assert "Traceback" not in ran.stderr


def test_a_mapping_that_was_merged_before_it_was_read_has_no_key_twice(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: 1, y: 2}\ns: {b: &b {<<: *a, x: 3}}\nc: {<<: *b}\n")
    found = read_keys(str(file))
    assert (found["s.b.x"], found["c.x"], found["c.y"]) == (3, 3, 2)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.toml", "flags.yaml"])
def test_a_mark_of_the_encoding_is_passed_over(tmp_path, name):
    file = tmp_path / name
    file.write_text(FORMATS[name], encoding="utf-8-sig")
    assert str(read_keys(str(file))["data.micro_batch_size"]) == "4"


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    for path, said in ((tmp_path / "gone.yaml", "no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(ConfigError, match=said):
            read_text(str(path))


WRONG = ["[1, 2]", "{a: 1}", "true", "x", "-3", "0", "1.5", "1e400", "''", "[[1]]", "2020-01-01", ".nan"]
KEYS = [
    "per_device_train_batch_size",
    "train_batch_size",
    "per_device_batch_size",
    "data.micro_batch_size",
    "rampup_batch_size",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_type_is_an_error_and_not_a_bug(cli, tmp_path, key, value):
    file = tmp_path / "a.yaml"
    file.write_text(f"{key}: {value}\ngradient_accumulation_steps: {value}\n")
    for verb in ("plan", "ramp"):
        assert cli(verb, str(file), "--devices", "8").code in (0, 2)


@pytest.mark.parametrize(
    "text",
    [
        "{" + ", ".join(f"a{n}: 1" for n in range(22_000)) + "}",  # 240 KB: too many nodes for a tree to be made
        "a: [" + "1," * 120_000 + "]",
        "- 1\n" * 60_000,
    ],
    ids=["mapping", "list", "lines"],
)
def test_a_large_file_is_refused_before_its_tree_is_made(tmp_path, monkeypatch, text):
    import yaml

    monkeypatch.setattr(yaml, "load", None)
    file = tmp_path / "large.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="it has more than 40,000 keys, values and list items"):
        read_keys(str(file))
