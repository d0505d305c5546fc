"""Configuration files in every format, and files that are hostile."""

from __future__ import annotations

import json
import resource
import time

import pytest

from batchwright.cli.files import read_keys, read_text
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
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_clearly_and_soon(tmp_path, name):
    file = tmp_path / name
    file.write_text(HOSTILE[name])
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        read_keys(str(file))
    assert str(caught.value) and len(str(caught.value)) < 500
    assert time.process_time() - before < 1  # CPU time: a busy machine does not matter
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024


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
