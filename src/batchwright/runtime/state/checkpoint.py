"""Checkpoints: a position and its weights, complete or absent, for any number of ranks.

    RUN/checkpoints/step-000000000120-launch-00003/
        manifest.json            size and SHA-256 of every other file: a checkpoint without one of them is not complete
        state.json               position, step, options of the optimizer, fingerprint, versions: everything but tensors
        rng/rank-00000.json      the random generators of one rank
        tensors/                 torch.distributed.checkpoint: reshards over ranks, and between DDP, FSDP2 and plain

A checkpoint is written to another folder and renamed when every file is synced, so a reader sees all of it or nothing.
A save consists of these parts, with a barrier after each; if one rank fails, all ranks fail:

    may_save() or fail;  write tensors, rng;  write state, manifest;  may_save() or fail;  rename;  delete old ones

`may_save` is the fence: a process that a newer launch has replaced must not write.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import BatchwrightError, EnvironmentFault, PlanError, RunError
from batchwright.rundir import names
from batchwright.rundir.atomic import sync_directory
from batchwright.rundir.checkpoint import MANIFEST, STATE, listing, none_complete, read_manifest, refuse_newer
from batchwright.rundir.files import digest_of, read_json, write_fault, write_json
from batchwright.runtime.stages import Stages

from . import generators, tensors
from .saved import Saved as Saved

SCHEMA = 1
_PARTIAL = ".partial-"


class Checkpoints:
    """The checkpoints of a run: `save`, `newest`, `load`. All ranks call each of them together.

    - `keep`: the number of checkpoints to keep. A save deletes older ones after it has succeeded.
    - `asynchronous`: `save` copies the tensors and returns; a thread writes them. The next `save` waits for it. Errors of
      the thread are raised by the next `save` or by `wait`.
    - `group`: a gloo group of all ranks, used for nothing else, since a thread uses it; None for one process.
    - `may_save`: called before a save, and again right before the checkpoint becomes visible.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        group: dist.ProcessGroup | None = None,
        may_save: Callable[[], bool] | None = None,
    ) -> None:
        if keep < 1:
            raise PlanError(
                f"keep={keep}: must be at least 1, to leave a checkpoint to resume from.",
                field="keep",
                given=keep,
                nearest=(1,),
            )
        self.directory, self.keep, self.asynchronous = Path(directory), keep, asynchronous
        self._group, self._may_save = group, may_save or (lambda: True)
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._damaged: set[str] = set()

    def save(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        step: int,
        position: int,
        launch: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> Saved | None:
        """Save after `step` steps; the next one starts at `position`. Returns None if a thread does the writing."""
        self.wait()
        name = names.checkpoint(step, launch)
        parts, rest = tensors.split(model, optimizers)
        if isinstance(model, Stages):
            model.check_shared()
            # Which parameters a group has is not stored: it is known wherever the checkpoint is loaded.
            every = [item for each in model.gathered(rest) for item in each.items()]
            rest = {path: value for path, value in every if not path.endswith("/params")}
        content = {
            "schema": SCHEMA,
            "step": step,
            "position": position,
            "launch": launch,
            "ranks": self.ranks,
            "saved_at": time.time(),
            "optimizer": rest,
            **dict(state or {}),
        }
        job = _Job(name, content, generators.capture(_device(model)))
        if not self.asynchronous:
            return self._write(job, parts)
        copies = tensors.snapshot(parts)
        self._thread = threading.Thread(target=self._in_background, args=(job, copies), name="batchwright-save")
        self._thread.start()
        return None

    def wait(self) -> Saved | None:
        """Wait until a save in the background has ended; raise its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def busy(self) -> bool:
        """Whether a thread is writing a save."""
        return self._thread is not None and self._thread.is_alive()

    def newest(self, *, verify: bool = True) -> Saved | None:
        """The newest complete checkpoint. A damaged one is skipped with a warning that names the file.

        A checkpoint of a newer schema is an error: an older batchwright must not resume from before it.
        """
        found = self._together(lambda: listing(self.directory) if self.rank == 0 else [])[0]
        skipped: list[str] = []
        for name, step, launch in found:
            path = self.directory / name
            problems = [p for p in self._together(lambda path=path: self._problem(path, verify)) if p]
            if not problems:
                return Saved(path, step, launch, read_json(path / STATE), tuple(skipped))
            message = f"checkpoint {name} is damaged and was skipped: {problems[0]}"
            skipped.append(message)
            self._damaged.add(name)
            if self.rank == 0:
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if skipped:
            raise none_complete(self.directory, skipped)
        return None

    def load(self, saved: Saved, model: nn.Module, *optimizers: Optimizer, restore_generators: bool = True) -> bool:
        """Load a checkpoint into a model and its optimizers, sharded in any way. Returns whether generators were restored.

        Generators belong to a rank and to a kind of device, so they are restored only if the number of ranks is that of the
        save, and the model is on the same kind of device. Otherwise seed them: the ranks must draw different numbers.
        """
        self.wait()
        parts, _ = tensors.split(model, optimizers)
        self._together(lambda: tensors.SafeReader(saved.path / "tensors").read_metadata() and None)
        elsewhere = {path for each in model.gathered(list(parts)) for path in each} if isinstance(model, Stages) else ()
        tensors.load(parts, saved.path / "tensors", self._group, elsewhere)
        tensors.join(model, optimizers, parts, saved.state["optimizer"])
        if not restore_generators or saved.state["ranks"] != self.ranks:
            return False
        return generators.restore(read_json(saved.path / "rng" / f"rank-{self.rank:05d}.json"), _device(model))

    def _problem(self, path: Path, verify: bool) -> str | None:
        """What is wrong with a checkpoint, or None. With `verify`, each rank reads its part of the files."""
        try:
            manifest = read_manifest(path)
        except RunError as error:
            return str(error)
        refuse_newer(manifest.schema, path)
        return manifest.problem(lambda index: verify and index % self.ranks == self.rank)

    def _in_background(self, job: _Job, parts: Mapping[str, Tensor]) -> None:
        try:
            self._outcome = self._write(job, parts)
        except BaseException as error:
            self._outcome = error

    def _write(self, job: _Job, parts: Mapping[str, Tensor]) -> Saved:
        partial, final = self.directory / f"{_PARTIAL}{job.name}", self.directory / job.name
        done = False
        try:
            self._together(lambda: self._begin(partial, final))
            listed = self._together(lambda: self._write_generators(job, partial))
            listed += self._together(lambda: self._write_tensors(parts, partial))
            self._together(lambda: self._commit(job, listed, partial, final) if self.rank == 0 else None)
            done = True
        except BaseException as error:
            cause, kept = tensors.disk_error(error) or error, "Checkpoints before it are untouched."
            raise write_fault(cause, f"checkpoint {job.name}", self.directory, kept) from error
        finally:
            if not done and self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        return Saved(final, job.state["step"], job.state["launch"], job.state)

    def _begin(self, partial: Path, final: Path) -> None:
        if self.rank:
            return
        self._fence(final.name)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sweep(final.name)
        if final.exists():
            raise RunError(
                f"checkpoint {final} exists already, and is never overwritten. Each start of the training processes needs "
                "its own launch number: use the next one.",
                field="launch",
                given=final.name,
            )
        if partial.is_symlink():  # rmtree does not remove a symbolic link
            partial.unlink()
        shutil.rmtree(partial, ignore_errors=True)
        for folder in (partial, partial / "tensors", partial / "rng"):
            folder.mkdir()

    def _sweep(self, name: str) -> None:
        """Delete incomplete folders of earlier launches. This launch may write, so those may not."""
        _, launch = names.read_checkpoint(name) or (0, 0)
        for path in self.directory.glob(f"{_PARTIAL}*"):
            numbers = names.read_checkpoint(path.name.removeprefix(_PARTIAL))
            if path.name.startswith(f"{_PARTIAL}old-") or (numbers and numbers[1] < launch):
                shutil.rmtree(path, ignore_errors=True)

    def _write_generators(self, job: _Job, partial: Path) -> dict[str, tuple[int, str]]:
        file = partial / "rng" / f"rank-{self.rank:05d}.json"
        write_json(file, job.rng)
        return {f"rng/{file.name}": (file.stat().st_size, digest_of(file))}

    def _write_tensors(self, parts: Mapping[str, Tensor], partial: Path) -> dict[str, tuple[int, str]]:
        written = tensors.save(parts, partial / "tensors", self._group)
        return {f"tensors/{name}": facts for name, facts in written.items()}

    def _commit(self, job: _Job, listed: list[dict[str, tuple[int, str]]], partial: Path, final: Path) -> None:
        write_json(partial / STATE, job.state)
        files = {name: facts for part in listed for name, facts in part.items()}
        files[STATE] = ((partial / STATE).stat().st_size, digest_of(partial / STATE))
        entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
        write_json(partial / MANIFEST, {"schema": SCHEMA, "files": entries})
        for folder in (partial / "tensors", partial / "rng", partial):
            sync_directory(folder)
        self._fence(final.name)
        os.rename(partial, final)
        sync_directory(self.directory)
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        kept = 0
        for name, _, _ in listing(self.directory):
            sound = name not in self._damaged and self._problem(self.directory / name, verify=False) is None
            complete = name == newest.name or sound
            kept += complete
            # A damaged checkpoint stays, for its owner to inspect.
            if complete and kept > self.keep:
                # Renaming is atomic; deleting takes time and may be interrupted.
                old = self.directory / f"{_PARTIAL}old-{name}"
                os.rename(self.directory / name, old)
                shutil.rmtree(old, ignore_errors=True)

    def _fence(self, name: str) -> None:
        if not self._may_save():
            raise EnvironmentFault(
                f"checkpoint {name} was not written: a newer launch has taken over this run. Nothing was changed; this "
                "process stops.",
                field="launch",
                given=name,
            )

    def _together(self, part: Callable[[], Any]) -> list[Any]:
        """Call `part` on every rank and return all results; if one rank fails, all raise its error."""
        answer, fault = None, None
        try:
            answer = part()
        except BaseException as error:
            if self._group is None or not isinstance(error, Exception):
                raise
            known = error if isinstance(error, BatchwrightError) else tensors.disk_error(error)
            fault = known or RunError(f"{type(error).__name__}: {error}")
        if self._group is None:
            return [answer]
        gathered: list[Any] = [None] * self.ranks
        cast(Any, dist).all_gather_object(gathered, (answer, fault), group=self._group)
        for _, first in gathered:
            if first is not None:
                raise first
        return [answer for answer, _ in gathered]


@dataclass(frozen=True)
class _Job:
    name: str
    state: dict[str, Any]
    rng: dict[str, Any]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
