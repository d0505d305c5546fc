"""The command line with commands that need no torch: exit codes, one JSON document, standard output and error."""

from __future__ import annotations

import errno
import json
import sys

import pytest

from batchwright.cli import main

PROGRAM = "import sys; sys.exit('MemoryError' if int(sys.argv[1]) > {} else 0)"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["probe", *arguments])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def command(limit: int) -> list[str]:
    return ["--", sys.executable, "-S", "-c", PROGRAM.format(limit), "{micro_batch_size}"]


def test_text_to_stdout_and_progress_to_stderr(capsys, tmp_path):
    code, out, err = run(capsys, "--limit-only", "--dir", str(tmp_path), *command(5))
    assert code == 0
    assert out.startswith("micro_batch_size 5 is the largest that ran; 6 did not")
    assert "recommended: no size (see the notes)" in out
    assert "limit       micro_batch_size 8" in err
    assert "\x1b" not in out + err


def test_the_limit_and_the_margin_are_two_parts_of_the_memory(capsys, tmp_path):
    arguments = ["--memory", "256MiB", "--margin", "56MiB", "--limit-only", "--max", "1", "--dir", str(tmp_path)]
    code, out, _ = run(capsys, *arguments, *command(5))
    assert code == 0
    assert "; limit 200.0 MiB, and 56.0 MiB more are kept free\n" in out


def test_a_timeout_of_centuries(capsys, tmp_path):
    code, _, err = run(capsys, "--timeout", "1e10", "--limit-only", "--max", "1", "--dir", str(tmp_path), *command(5))
    assert code == 0, err


def test_a_project_file_names_the_task(capsys, tmp_path):
    file = tmp_path / "batchwright.yaml"
    file.write_text("task: {target: missing.py:task, args: {layers: 2}}\nbatch: {global_batch_size: 64}\n")
    code, _, err = run(capsys, str(file))
    assert code == 2
    assert "task file missing.py does not exist" in err
    file.write_text("batch: {global_batch_size: 64}\n")
    code, _, err = run(capsys, str(file))
    assert code == 2
    assert "names no task" in err
    file.write_text("task: {target: missing.py:task, args: [1]}\n")
    code, _, err = run(capsys, str(file))
    assert code == 2
    assert "task.args must be KEY: VALUE, not '[1]'" in err


def test_nothing_fits_exits_3_with_one_document(capsys, tmp_path):
    code, out, _ = run(capsys, "--json", "--dir", str(tmp_path), *command(0))
    assert code == 3
    assert json.loads(out)["error"]["type"] == "NothingFitsError"


def test_a_full_disk_prints_the_results_and_exits_4(capsys, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("batchwright.probe.journal.os.fsync", full)
    code, out, err = run(capsys, "--limit-only", "--json", "--dir", str(tmp_path), *command(5))
    assert code == 4
    assert json.loads(out)["max_micro_batch_size"] == 5
    assert "No space left on device" in err


def test_a_folder_that_cannot_be_made_does_not_stop_a_probe(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = run(capsys, "--limit-only", "--dir", str(tmp_path / "file" / "below"), *command(5))
    assert code == 4
    assert "micro_batch_size 5 is the largest" in out
    assert "journal could not be written" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["missing.py:task"],
        ["train.sh"],
        ["--memory", "lots", *command(5)],
        ["--margin", "2GiB", "--memory", "1GiB", *command(5)],
        ["--max", "3", "--multiple-of", "8", *command(5)],
        ["--step-regex", "(", *command(5)],
        ["--ranks", "2", *command(5)],
        ["--device", "cpu", *command(5)],
        ["--on", "cpu", *command(5)],
        ["--arg", "width", "missing.py:task"],
        ["--", "true"],
    ],
)
def test_an_invalid_request_exits_2_before_anything_runs(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert not out
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    "flag", ["--evaluation", "--longest", "--accumulation-steps 1", "--peak-tflops 9", "--workers 1"]
)
def test_flags_for_tasks_are_refused_with_a_command(capsys, tmp_path, flag):
    code, _, err = run(capsys, *flag.split(), "--dir", str(tmp_path), *command(5))
    assert code == 2 and f"{flag.split()[0]} is for tasks" in err


def test_a_step_regex_is_refused_with_a_task(capsys, tmp_path):
    (tmp_path / "train.py").write_text("def task(): ...\n")
    code, _, err = run(capsys, f"{tmp_path / 'train.py'}:task", "--step-regex", "x", "--dir", str(tmp_path / "j"))
    assert code == 2 and "--step-regex" in err and "is for commands" in err


def test_without_torch_a_task_names_the_extra_and_leaves_no_directory(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.probe.runner.find_spec", lambda name: None)
    (tmp_path / "train.py").write_text("def task(): ...\n")
    code, _, err = run(capsys, f"{tmp_path / 'train.py'}:task", "--dir", str(tmp_path / "j"))
    assert code == 4 and "batchwright[torch]" in err
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("device", ["cuda", "h100"])
def test_device_is_refused_and_names_on(capsys, tmp_path, device):
    code, _, err = run(capsys, "--device", device, "--dir", str(tmp_path), *command(5))
    assert code == 2 and "--on is the device to run on" in err and "--on h100" not in err and "--memory" in err
