"""Every verb with anything a user types: documented exit codes, a sentence, one JSON document, soon, and no stray file.

The lines are those of `python -m tests.cli.fuzz`; Hypothesis chooses their seeds here. (`st.randoms` would make a failing
line small, but repeats most lines.)
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli import fuzz
from tests.cli.lines import MAKERS, Line, line
from tests.examples import many


@pytest.fixture(scope="module")
def place():
    with fuzz.workspace() as made, fuzz.no_processes():
        yield made


def answers(place, one: Line) -> fuzz.Ran:
    wrong, ran, _ = fuzz.problems(one, place)
    assert not wrong, f"{fuzz.shown(one)}\n" + "\n".join(wrong)
    return ran


def any_lines(place, verb: str, times: int = 40) -> None:
    @settings(deadline=None, max_examples=many(fuzz.SHARES[verb] * times), suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def test(seed):
        answers(place, line(Random(seed), verb))

    test()


@pytest.mark.parametrize("verb", [verb for verb in MAKERS if verb != "check"])
def test_any_line(place, verb):
    any_lines(place, verb)


@pytest.mark.torch
def test_any_line_of_check(place):
    with fuzz.small_checks():
        any_lines(place, "check", times=20)  # each compares gradients


RUN = "run --global-batch-size 8 --samples 64"
SLURM = f"{RUN} --dry-run --engine slurm train.py"
INNER = "--pipeline-parallel 2 --devices 2 pipeline_style=inner --pipeline-schedule 1f1b"
LONG = "x" * 300


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        # a FIFO beside the script of a command would be read for ever
        ("probe --limit-only -- python train.py {micro_batch_size}", 0, ""),
        # an argument is not always the name of a file
        (f"probe --limit-only -- python -c {LONG} {{micro_batch_size}}", 0, ""),
        (f"probe --limit-only -- python -m {LONG} {{micro_batch_size}}", 0, ""),
        # a task that is no file
        *[(f"{verb} ~nobody-here/x.py", 2, "does not exist") for verb in ("probe", "estimate", "check", RUN)],
        *[(f"{verb} {LONG}.py", 2, "does not exist") for verb in ("probe", "estimate", "check", RUN)],
        *[(f"{verb} fifo.py", 2, "is not a regular file") for verb in ("probe", "estimate", "check", RUN)],
        # settings of the loop
        (f"{RUN} train.py 'task.settings={{1: 2}}'", 2, "task.settings has no field '1'."),
        (f"{RUN} train.py task.settings.learning_rate=5", 2, "learning_rate=5: must be a mapping with peak_lr, end_sample"),
        (f"{RUN} train.py 'task.settings.learning_rate={{peak_lr: 1, end_sample: 9, x: 1}}'", 2, "has no field 'x'."),
        (f"{RUN} train.py 'task.settings.learning_rate={{peak_lr: x, end_sample: 9}}'", 2, "peak_lr='x': must be a number."),
        (f"{RUN} train.py 'task.settings.learning_rate={{peak_lr: 1, end_sample: -9}}'", 2, "must be between 0 and end_sample"),
        (f"{RUN} train.py task.settings.max_norm=x", 2, "max_norm='x': must be a number."),
        (f"{RUN} train.py 'task.settings.grad_scaler=[]'", 2, "grad_scaler=[]: must be a number."),
        (f"{RUN} train.py task.settings.shuffle=5", 2, "shuffle=5: must be true or false."),
        (f"{RUN} train.py task.settings.micro_batch_size=4", 2, "is set by the run itself: leave it out, or give"),
        (f"{RUN} train.py launch.settings.max_norm=1", 2, "Did you mean task.settings?"),
        # the directory of a run
        (f"{RUN} -- ..", 0, "runs/command"),
        (f"{RUN} -- ''", 2, "the command has no program"),
        (f"{RUN} --dir '' -- true", 2, "--dir '': not a usable path: it is empty."),
        (f"{RUN} --dir --dry-run -- true", 2, "--dir needs a value, and --dry-run is another flag."),
        ("run --stop ''", 2, "--stop '': not a usable path: it is empty."),
        (f"{RUN} --dir train.py -- true", 4, "train.py cannot be written: File exists."),
        # more than anyone can read or wait for
        ("ramp --linear 1,1,1T --global-batch-size 20000 --nodes 1024 --devices-per-node 8", 2, "more stages are not valid."),
        (
            "ramp --linear 1,1,1T --global-batch-size 20000 --nodes 64 --devices-per-node 8 --micro-batch-size 2",
            2,
            "more batches have none.",
        ),
        (
            "run --linear 1,1,1T --global-batch-size 5000 --samples 9T --stop-every-stage --dry-run -- true",
            2,
            "5,000 launches, and at most 1,000 are allowed",
        ),
        ("estimate train.py --ranks 999999999999", 2, "--ranks=999999999999: must be at most 16,384."),
        # what is known is not always given
        ("run train.py --samples 8", 2, "only data_parallel_size=1 is known."),
        # the field of the library, which takes a record
        ("ramp probe=probe.json --global-batch-size 8 --devices 8", 2, "probe.json' is not the record that a probe prints"),
        # ramp takes what plan takes: three microbatches in each accumulation step
        (f"ramp {INNER} --global-batch-size 6 --micro-batch-size 3", 0, ""),
        (f"ramp {INNER} --global-batch-size 3", 0, ""),
        # text that is not Unicode, which a shell can pass and YAML can describe
        ("probe --limit-only -- train \udcff {micro_batch_size}", 0, ""),
        (f"{SLURM} --dir made/\udcff", 0, ""),
        (f"{SLURM} launch.slurm.name=\udcff", 0, ""),
        *[
            (f"{SLURM} 'launch.slurm.{key}=\"\\ud800\"'", 2, f"launch.slurm.{key} ")
            for key in ("name", "partition", "prologue", "srun")
        ],
    ],
)  # fmt: skip
def test_lines_that_once_ended_wrongly(place, text, code, said):
    argv = shlex.split(text)
    ran = answers(place, Line(argv))
    assert ran.code == code, ran
    assert said in ran.err, ran.err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.py --ranks 100000", "--ranks=100000: must be at most 1024"),
        ("keys.yaml", "takes no argument '1'"),
    ],
)
def test_checks_that_once_ended_wrongly(place, text, said):
    one = Line(["check", *text.split()], {"keys.yaml": b"task: {target: train.py, args: {1: 2}}"})
    ran = answers(place, one)
    assert ran.code == 2 and said in ran.err, ran


def test_a_misspelt_cause_is_found_before_torch_is_imported(place):
    code = "import sys; sys.modules['torch'] = None; from batchwright.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "check", "train.py", "--allow", "TYPO"]
    done = subprocess.run(command, cwd=place, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--allow='TYPO' is not a cause" in done.stderr


@pytest.mark.parametrize("program", ["true", "false", "no-such-program", "\udcff"])
def test_a_program_that_does_not_train(tmp_path, program):
    """Through real processes."""
    command = [
        sys.executable,
        "-m",
        "batchwright",
        "run",
        "--samples",
        "8",
        "--global-batch-size",
        "8",
        "--max-retries=0",
    ]
    done = subprocess.run(
        [*command, "--json", "--", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    assert done.returncode in (4, 5), done
    assert document["schema"] == 1
    assert "Traceback" not in done.stderr and "bug" not in done.stdout + done.stderr
    assert os.listdir(tmp_path) == ["runs"]
