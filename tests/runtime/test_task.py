"""A task from a user's file: it is found and imported, and its faults are reported as the user's."""

from __future__ import annotations

import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.core.errors import ConfigError, RunError
from batchwright.processes.target import task_file
from batchwright.runtime.task import Task, load_task

GOOD = """
    import torch
    from torch import nn
    from batchwright.runtime.task import Task

    def task(width: int = 2) -> Task:
        return Task(
            model=lambda: nn.Linear(width, 1),
            dataset=[torch.ones(width)] * 8,
            loss=lambda model, batch: (model(batch).sum(), len(batch)),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )

    def other(width): ...
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def test_a_function_of_a_file_gives_its_task(write: Any) -> None:
    write(GOOD)
    assert len(load_task("train.py:task").dataset) == 8
    assert load_task("train.py", {"width": 5}).dataset[0].shape == (5,)  # the default name is `task`


def test_the_module_replaces_nothing_and_sees_its_neighbours(write: Any) -> None:
    write("VALUE = 3\n", "neighbour_of_task.py")
    write("import neighbour_of_task\nassert neighbour_of_task.VALUE == 3\n" + textwrap.dedent(GOOD), "random.py")
    import random

    load_task("random.py:task")
    assert sys.modules["random"] is random
    del sys.modules["neighbour_of_task"]


def test_missing_things_are_named_with_the_nearest(write: Any) -> None:
    write(GOOD)
    with pytest.raises(ConfigError, match=r"task file nowhere.py does not exist"):
        load_task("nowhere.py:task")
    with pytest.raises(
        ConfigError, match=r"has no function 'tsak'. It has: other, task. Did you mean task\?"
    ) as caught:
        load_task("train.py:tsak")
    assert caught.value.nearest == ("train.py:task",)
    write("# a task is not here\ndef other(): ...\n", "words.py")
    with pytest.raises(ConfigError, match=r"has no function 'task'. It has: other."):  # only the import shows it
        load_task("words.py:task")
    write("def other(): ...\ndef other(): ...\n", "twice.py")
    with pytest.raises(ConfigError, match=r"has no function 'task'. It has: other."):
        load_task("twice.py")
    Path("latin.py").write_bytes("# coding: latin-1\ndef t\xe4sk(): ...\n".encode("latin-1"))
    assert task_file("latin.py:t\xe4sk")[1] == "t\xe4sk"
    Path("binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match=r"binary.py cannot be imported: "):
        load_task("binary.py")
    write("globals()['ta' + 'sk'] = 3\n", "dynamic.py")
    with pytest.raises(ConfigError, match=r"has no function 'task'. It has: none."):
        load_task("dynamic.py")
    with pytest.raises(ConfigError, match=r"takes no argument 'widht'; it takes: width. Did you mean width\?"):
        load_task("train.py:task", {"widht": 3})
    with pytest.raises(ConfigError, match="needs the argument 'width': --arg width="):
        load_task("train.py:other")
    with pytest.raises(RunError, match=r"train.py:other returned NoneType, not a batchwright.runtime.Task"):
        load_task("train.py:other", {"width": 1})


@pytest.mark.parametrize(
    "text, error",
    [
        ("def task():\n    return 1 / 0\n", "train.py:task failed: ZeroDivisionError: division by zero"),
        ("import nothing_like_this\ndef task(): ...\n", "train.py cannot be imported: ModuleNotFoundError"),
        ("def task(:\n", "train.py cannot be imported: SyntaxError"),
        ("raise SystemExit(3)\ndef task(): ...\n", "train.py cannot be imported: SystemExit: 3"),
    ],
)
def test_the_users_own_traceback_is_kept(text: str, error: str, write: Any) -> None:
    write(text)
    before = set(sys.modules)
    with pytest.raises(RunError) as caught:
        load_task("train.py:task")
    assert str(caught.value).startswith(error) and caught.value.exit_code == 5
    cause = caught.value.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    if "SyntaxError" not in error:
        assert frames[0].filename.endswith("train.py")
    assert not [name for name in set(sys.modules) - before if "train" in name and "failed" not in error]


def minimal(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "dataset": [1],
        "loss": lambda model, batch: (torch.ones(()), 1),
        "optimizer": torch.optim.SGD,
    }
    return Task(**(parts | changes))


def test_all_wrong_fields_of_a_task_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        minimal(model=3, dataset=iter([1]), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), collate=1)
    assert [v.field for v in caught.value.violations] == ["model", "dataset", "optimizer", "collate"]
    assert "map-style: len() and [i]" in str(caught.value)


def test_a_model_is_built_after_seeding_or_taken_as_it_is() -> None:
    task = minimal()
    first, second, other = (task.build_model(seed) for seed in (1, 1, 2))
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, other.weight)  # type: ignore
    module = nn.Linear(2, 1)
    assert minimal(model=module).build_model(1) is module
    with pytest.raises(RunError, match=r"returned int, not a torch.nn.Module"):
        minimal(model=lambda: 3).build_model(1)


def test_the_loss_is_a_sum_with_its_weight() -> None:
    model = nn.Linear(2, 1)
    assert minimal().loss_of(model, None)[1:] == (1, None)
    assert minimal(loss=lambda m, b: (torch.ones(()), 1, torch.zeros(()))).loss_of(model, None)[2] == 0
    with pytest.raises(RunError, match=r"returned a Tensor. It must return"):
        minimal(loss=lambda m, b: torch.ones(())).loss_of(model, None)
    with pytest.raises(RunError, match="returned 4 values"):
        minimal(loss=lambda m, b: (torch.ones(()), 1, 2, 3)).loss_of(model, None)
