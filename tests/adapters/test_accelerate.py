"""docs/accelerate.md on one process and on two: what Accelerate does, and what the loop of the page does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import batchwright
from batchwright.runtime import Ledger, audit
from tests.runtime.conftest import _run_ranks as run_ranks

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "accelerate.md"


def page() -> dict[str, Any]:
    """The names that the first block of the page defines."""
    names: dict[str, Any] = {"__name__": "page"}
    block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 64)
    return torch.nn.Sequential(*layers).to(dtype)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def truth(names: dict[str, Any], positions: range, weights: Any = None) -> torch.Tensor:
    """The gradient of these samples as one batch, in float64; for new weights, or these."""
    model = network(torch.float64)
    for own, given in zip(model.parameters(), weights or (), strict=False):
        own.data = given.detach().double()
    total, weight = names["loss"](model, names["collate"]([names["dataset"][i] for i in names["order"].ids(positions)]))
    (total / weight).backward()
    return flat(model)


def error(gradient: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((gradient - wanted).norm() / wanted.norm())


def theirs(names: dict[str, Any], positions: range) -> list[torch.Tensor]:
    """The gradients with which Accelerate's own accumulation over 8 micro batches of 4 reaches the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    rows = [names["dataset"][i] for i in names["order"].ids(positions)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=names["collate"])
    model = network()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            total, weight = names["loss"](model, batch)
            accelerator.backward(total / weight)  # the mean that a model returns
            if accelerator.sync_gradients:
                found.append(flat(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def errors(names: dict[str, Any], folder: Path, **options: Any) -> list[float]:
    """The error of each gradient with which the loop of the page, as it is, calls the optimizer; it clips to a norm of 1."""
    from accelerate import Accelerator

    found: list[float] = []

    def compare(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = names["schedule"].at_step(len(found))
        weights = optimizer.param_groups[0]["params"]
        wanted = truth(names, range(step.start_sample, step.end_sample), weights)
        got = torch.cat([weight.grad.double().flatten() for weight in weights])
        found.append(error(got, wanted / max(1.0, float(wanted.norm()))))

    with register_optimizer_step_pre_hook(compare):
        names["train"](folder, Accelerator(cpu=True), **options)
    return found


def test_accelerate_alone_is_a_mean_of_means_and_divides_a_partial_window_by_k():
    names = page()
    full, partial = theirs(names, range(40))
    wanted = truth(names, range(32, 40))
    assert error(full, truth(names, range(32))) == pytest.approx(0.25, abs=0.005)  # as the page says
    along = float(partial @ wanted / wanted.norm() ** 2)
    assert along == pytest.approx(0.25, abs=0.02)  # 2 of 8 micro batches


def test_the_loop_has_the_gradient_of_the_whole_batch_in_every_step_of_the_ramp(tmp_path):
    names = page()
    found = errors(names, tmp_path)
    assert len(found) == names["schedule"].total_steps == 13
    assert max(found) <= 1e-5


def test_the_loop_refuses_an_accumulation_of_its_own(tmp_path):
    from accelerate import Accelerator

    with pytest.raises(ValueError, match="gradient_accumulation_steps=4: must be 1"):
        page()["train"](tmp_path, Accelerator(cpu=True, gradient_accumulation_steps=4))


def on_two(rank: int, folder: str) -> tuple[list[float], list[Any]]:
    """On two processes: a run that one process continues, and one that continues that of one process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    from accelerate import Accelerator

    names = page()
    assert Accelerator(cpu=True).num_processes == 2
    found = errors(names, Path(folder) / "2-to-1", stop_after=6)
    assert len(found) == 6
    last = names["train"](Path(folder) / "1-to-2", Accelerator(cpu=True), micro_batch_size=2)
    return found, [p.tolist() for p in last.parameters()]


def test_two_processes_are_exact_and_resume_changes_the_number_of_processes(tmp_path):
    from accelerate import Accelerator

    names = page()
    whole = names["train"](tmp_path / "whole", Accelerator(cpu=True))
    names["train"](tmp_path / "1-to-2", Accelerator(cpu=True), stop_after=6)
    (errors, weights), (others, _) = run_ranks(on_two, 2, str(tmp_path))
    assert max(errors + others) <= 1e-5
    again = names["train"](tmp_path / "2-to-1", Accelerator(cpu=True), micro_batch_size=2)
    for name in ("2-to-1", "1-to-2"):  # the audit compares the id of every sample with the order
        found = audit(tmp_path / name)
        assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 256, 0, 0), found
        assert found.discarded_samples == 32  # steps 5 and 6 were trained after the save, and again after the resume
    for a, b, c in zip(whole.parameters(), again.parameters(), weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, torch.tensor(c), atol=1e-5, rtol=0)  # 1 -> 2
    complete = names["train"](tmp_path / "2-to-1", Accelerator(cpu=True))  # there is nothing to do
    assert (
        all(map(torch.equal, complete.parameters(), again.parameters())) and audit(tmp_path / "2-to-1").samples == 256
    )


def killed(folder: Path, place: str) -> None:
    """In a process of its own: the loop of the page, killed in its second save, at step 8."""
    from accelerate import Accelerator

    write, replace = Path.write_text, Path.replace
    written: list[Path] = []

    def die(path: Path, *given: Any) -> Any:
        if path.name.startswith("state."):
            written.append(path)
        if len(written) == 2:
            if place == "writing":
                write(path, given[0][: len(given[0]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *given) if isinstance(given[0], str) else replace(path, *given)

    if place == "writing":
        Path.write_text = die
    else:
        Path.replace = die
    page()["train"](folder, Accelerator(cpu=True))


@pytest.mark.parametrize("place", ["writing", pytest.param("renaming", marks=pytest.mark.rounds)])
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path, place):
    from accelerate import Accelerator

    called = f"killed(Path({str(tmp_path)!r}), {place!r})"
    code = f"from pathlib import Path; from tests.adapters.test_accelerate import killed; {called}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(tmp_path.glob("checkpoints/*"))) == 2
    page()["train"](tmp_path, Accelerator(cpu=True), micro_batch_size=2)
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 256, 0, 0), found
    assert found.discarded_samples == 64  # steps 5 to 8


def driven() -> None:
    """In a process of a launch: the loop of the page, killed once, on rank 0 and after the step that ends at sample 48."""
    from accelerate import Accelerator

    applied, marker = Ledger.applied, Path(os.environ["BATCHWRIGHT_RUN_DIR"]) / "signalled"

    def die(ledger: Any, step: int, start: int, size: int, *given: Any) -> None:
        applied(ledger, step, start, size, *given)
        if start + size == 48 and os.environ.get("RANK", "0") == "0" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.applied = die
    page()["train"](Path("unused"), Accelerator(cpu=True))


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.rounds)])
def test_a_ramp_under_run_survives_a_kill(tmp_path, nodes):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.adapters.test_accelerate import driven; driven()"
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node {devices} --no-python".split()]
    status = batchwright.run(
        [*(torchrun if nodes > 1 else ()), sys.executable, "-c", code],
        thresholds="0:8 64:16", samples=128, micro_batch_size=4, nodes=nodes, devices_per_node=1,
        node_policy="constant-work", dir=str(tmp_path), progress=False, retry_seconds=0,
        environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.discarded_samples) == (True, 128, 0, 0, 16), found
    ranks = Counter(path.name[:12] for path in tmp_path.glob("ledger/*"))
    assert sorted(ranks.values()) == ([1, 1, 2] if nodes > 1 else [1, 1])
