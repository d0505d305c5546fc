"""Arrays and the position of a JAX run in one checkpoint, saved with orbax and loaded onto any number of devices.

    RUN/checkpoints/step-000000000120-launch-00003/
        state.json         the position and the conditions of the run
        orbax/state        the user's arrays            orbax/position       the same integer, beside them
        manifest.json      the size and SHA-256 of every other file

It is written to another folder and renamed when it is complete. The files around orbax's are those of every checkpoint of
batchwright (`rundir/checkpoint.py`), so `run`, `run --status` and `report` read this one as any other.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import EnvironmentFault, RunError
from batchwright.rundir import atomic, names
from batchwright.rundir.checkpoint import MANIFEST, STATE, listing, none_complete, read_manifest, refuse_newer
from batchwright.rundir.files import digest_of, read_json, write_fault, write_json
from batchwright.runtime.state.saved import Saved

from .process import from_first

_ARRAYS, _PARTIAL = "orbax", ".partial-"


def save(path: Path | str, state: Any, position: int) -> None:
    """Save a tree of arrays and the position with orbax; all processes call it.

    A loop of your own with orbax's CheckpointManager saves the same two items: `Composite(state=StandardSave(state),
    position=JsonSave({"position": position}))`.
    """
    items = {"state": ocp.args.StandardSave(state), "position": ocp.args.JsonSave({"position": position})}
    with _checkpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), args=ocp.args.Composite(**items))


def restore(path: Path | str, like: Any) -> tuple[Any, int]:
    """The arrays and the position of a checkpoint. `like` is a tree of arrays, or of `jax.ShapeDtypeStruct`s, with the
    shardings that the arrays are to have; the checkpoint may be of another number of processes and devices."""
    items = {"state": ocp.args.StandardRestore(jax.tree.map(_shape, like)), "position": ocp.args.JsonRestore()}
    with _checkpointer() as checkpointer:
        found: Any = checkpointer.restore(Path(path).absolute(), args=ocp.args.Composite(**items))
    return found["state"], int(found["position"]["position"])


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _shape(leaf: Any) -> Any:
    # An array of numpy has none. Without one, orbax takes that of the save, whose devices may not be here.
    place = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


class Checkpoints:
    """The checkpoints of a run: `save`, `newest`, `load`. All processes call each of them."""

    def __init__(self, directory: Path | str, *, keep: int = 2, may_save: Callable[[], bool] = lambda: True) -> None:
        self.directory, self.keep, self._may_save = Path(directory).absolute(), keep, may_save

    def save(self, arrays: Any, *, step: int, position: int, launch: int, state: Mapping[str, Any]) -> Saved:
        """Save a tree of arrays; it returns when the checkpoint is complete."""
        name = names.checkpoint(step, launch)
        partial, final = self.directory / f"{_PARTIAL}{name}", self.directory / name
        document = {"schema": SCHEMA, **state, "step": step, "position": position, "launch": launch}
        self._fence(name)
        try:
            if jax.process_index() == 0:
                self._begin(partial, final)
            _barrier(f"{name} begins")
            save(partial / _ARRAYS, arrays, position)
            self._digests(partial, name)
            self._fence(name)
            if jax.process_index() == 0:
                _commit(partial, final, document)
                self._prune()
            _barrier(f"{name} ends")
        except (OSError, ValueError) as error:
            fault = _disk_error(error)
            raise write_fault(fault, f"checkpoint {name}", self.directory, "Older ones are untouched.") from error
        return Saved(final, step, launch, document)

    def newest(self, *, verify: bool = True) -> Saved | None:
        """The newest complete checkpoint; None if there is none, and an error if all are damaged.

        The list is that of process 0: on a network file system, others may not see the newest folder yet. Processes share the
        work of computing hashes.
        """
        skipped: list[str] = []
        for name, step, launch in from_first(
            "listing the checkpoints", lambda: listing(self.directory), field="checkpoint"
        ):
            path = self.directory / name
            problem = self._problem(path, verify)
            if _all(problem is None):
                return Saved(path, step, launch, read_json(path / STATE), tuple(skipped))
            skipped.append(f"{name}: {problem or 'another process found a damaged file.'}")
            warnings.warn(f"batchwright: passing over checkpoint {skipped[-1]}", stacklevel=2)
        if skipped:
            raise none_complete(self.directory, skipped)
        return None

    def _problem(self, path: Path, verify: bool) -> str | None:
        """What is wrong with a checkpoint, or None; with `verify`, each process reads its part of the files."""
        try:
            manifest = read_manifest(path)
        except (RunError, OSError) as error:
            return str(error)
        refuse_newer(manifest.schema, path)
        return manifest.problem(lambda index: verify and index % jax.process_count() == jax.process_index())

    def load(self, saved: Saved, like: Any) -> Any:
        """The arrays of a checkpoint, placed as those of `like`."""
        arrays, position = restore(saved.path / _ARRAYS, like)
        if position != saved.position:
            raise RunError(
                f"{saved.path} is damaged: its arrays are of position {position:,}, and {STATE} says {saved.position:,}.",
                field="checkpoint",
                given=position,
            )
        return arrays

    def _fence(self, name: str) -> None:
        if not _all(jax.process_index() != 0 or self._may_save()):
            raise EnvironmentFault(
                f"{name} was not saved: a newer launch has taken over {self.directory.parent}.", field="launch"
            )

    def _digests(self, partial: Path, name: str) -> None:
        """Each process hashes its part of the files; the results meet in files, as thousands of processes may save."""
        me, count = jax.process_index(), jax.process_count()
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        listed = {
            path.relative_to(partial).as_posix(): {"size": path.stat().st_size, "sha256": digest_of(path)}
            for path in files[me::count]
        }
        _barrier(f"{name} listed")  # nobody adds files before all have listed them
        write_json(partial / "digests" / f"{me}.json", listed)
        _barrier(f"{name} hashed")

    def _begin(self, partial: Path, final: Path) -> None:
        if final.exists():
            raise RunError(
                f"checkpoint {final} exists already, and is never overwritten. Each start of the training processes needs "
                "its own launch number: use the next one.",
                field="launch",
                given=final.name,
            )
        # This launch may write, so no other one does: what is incomplete was left by an earlier launch.
        for rest in self.directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(rest, ignore_errors=True)
        partial.mkdir(parents=True)

    def _prune(self) -> None:
        """Delete the oldest complete checkpoints. A damaged one stays, for its owner to inspect."""
        kept = 0
        for name, _, _ in listing(self.directory):
            try:
                kept += read_manifest(self.directory / name).problem(lambda index: False) is None
            except RunError:
                continue
            if kept > self.keep:
                old = self.directory / f"{_PARTIAL}{name}"
                os.rename(self.directory / name, old)  # from here on it does not count
                shutil.rmtree(old, ignore_errors=True)


def _commit(partial: Path, final: Path, document: Mapping[str, Any]) -> None:
    files: dict[str, Any] = {}
    for part in sorted((partial / "digests").iterdir()):
        files |= cast("dict[str, Any]", read_json(part))
    shutil.rmtree(partial / "digests")
    write_json(partial / STATE, document)
    state = partial / STATE
    files[STATE] = {"size": state.stat().st_size, "sha256": digest_of(state)}
    write_json(partial / MANIFEST, {"schema": SCHEMA, "files": files})
    os.rename(partial, final)
    atomic.sync_directory(final.parent)


def _disk_error(error: OSError | ValueError) -> OSError | ValueError:
    """The error of the disk inside an error of tensorstore, which writes for orbax."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else error


def _barrier(name: str) -> None:
    multihost_utils.sync_global_devices(f"batchwright {name}")


def _all(fine: bool) -> bool:
    """Whether it is fine on all processes."""
    return bool(np.all(multihost_utils.process_allgather(np.array(fine)))) if jax.process_count() > 1 else fine
