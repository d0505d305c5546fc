"""Checkpoints: complete or absent, damage is named, hostile files run nothing, any ranks and strategies."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

sys.path.insert(0, str(Path(__file__).parents[1] / "loop"))  # its helpers, under any import mode

from loop_runs import call

from batchwright.core.errors import EnvironmentFault, PlanError, RunError
from batchwright.core.ramp.rules import Constant
from batchwright.rundir.files import digest_of, write_json
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.state import generators, tensors
from batchwright.runtime.state.checkpoint import Checkpoints
from batchwright.runtime.state.fingerprint import changes, dataset_digest, fingerprint


def made(seed: int = 0, size: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.ones(2, size)).sum().backward()
    optimizer.step()
    return model, optimizer


def equal(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.fixture
def two(tmp_path) -> tuple[Checkpoints, nn.Module]:
    """Checkpoints of steps 1 and 2, between which the model changed; and the model of step 1."""
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=1, position=8)
    first = made()[0]
    first.load_state_dict(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1)
    checkpoints.save(model, optimizer, step=2, position=16)
    return checkpoints, first


def resign(path: Path) -> None:
    """Make the manifest match the files, as an attacker would."""
    files = {
        n: {"size": (path / n).stat().st_size, "sha256": digest_of(path / n)}
        for n in json.loads((path / "manifest.json").read_text())["files"]
    }
    write_json(path / "manifest.json", {"schema": 1, "files": files})


def test_everything_is_restored_and_the_newest_ones_are_kept(tmp_path):
    model, optimizer = made()
    optimizer.param_groups[0]["initial_lr"] = 0.5
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        saved = checkpoints.save(model, optimizer, step=step, position=8 * step, state={"extra": {"a": [1, None]}})
    drawn = (torch.rand(3), np.random.rand())
    assert saved.name == "step-000000000004-launch-00000"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-00000000000{n}-launch-00000" for n in (3, 4)]
    fresh, other = made(seed=1)
    newest = checkpoints.newest()
    assert (newest.step, newest.position, newest.state["extra"]) == (4, 32, {"a": [1, None]})
    assert checkpoints.load(newest, fresh, other) is True
    assert equal(model, fresh)
    assert other.state_dict()["state"][0]["exp_avg"].equal(optimizer.state_dict()["state"][0]["exp_avg"])
    assert other.param_groups[0] | {"params": 0} == optimizer.param_groups[0] | {"params": 0}
    assert torch.rand(3).equal(drawn[0]) and np.random.rand() == drawn[1]
    content = tensors.read(newest.path / "tensors")
    assert content["model/0.weight"].equal(model[0].weight)
    # Only tensors are pickled; the rest is JSON.
    assert json.loads((newest.path / "state.json").read_text())["optimizer"]["optimizer/param_groups/0/lr"] == 0.01


def test_a_newer_launch_is_newer_than_a_later_step(tmp_path):
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=9, position=72, launch=1)
    checkpoints.save(model, optimizer, step=5, position=40, launch=2)  # resumed from an older one
    assert checkpoints.newest().step == 5


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("tensors/__0_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:-9]), "bytes, but"),
        ("tensors/__0_0.distcp", lambda p: p.write_bytes(bytes(b ^ 1 for b in p.read_bytes())), "its content changed"),
        ("tensors/.metadata", lambda p: p.unlink(), "is missing"),
        ("state.json", lambda p: p.write_text(p.read_text().replace('"position": 16', '"position": 61')), "content changed"),
        ("manifest.json", lambda p: p.write_text(p.read_text()[:40]), "cannot be read"),
        ("manifest.json", lambda p: p.unlink(), "is missing"),
        ("manifest.json", lambda p: p.write_text(p.read_text().replace('"sha256": "', '"sha256": "0')), "json has SHA"),
        ("manifest.json", lambda p: p.write_text('{"schema": 1, "files": {"../x": {}, "state.json": {}}}'), "outside"),
        ("manifest.json", lambda p: p.write_text('{"schema": 1, "files": {"state.json": {}}}'), "has no size and SHA-256"),
        ("manifest.json", lambda p: p.write_text('{"schema": 1, "files": {"state.json": 7}}'), "has no size and SHA-256"),
        ("manifest.json", lambda p: p.write_text('{"schema": 1, "files": ["state.json"]}'), "lists no files"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_and_named(two, file, damage, says):
    checkpoints, first = two
    broken = checkpoints.newest(verify=False).path / file
    damage(broken)
    named = "" if "SHA" in says else Path(file).name
    with pytest.warns(RuntimeWarning, match=f"step-000000000002-launch-00000 is damaged.*{named}.*{says}"):
        saved = checkpoints.newest()
    assert saved.position == 8 and len(saved.skipped) == 1
    model, optimizer = made(seed=3)
    checkpoints.load(saved, model, optimizer)
    assert equal(model, first)
    # The damaged one stays when newer ones are saved and old ones deleted.
    for step in (3, 4, 5):
        checkpoints.save(model, optimizer, step=step, position=step * 8, launch=1)
    assert (checkpoints.directory / "step-000000000002-launch-00000").exists()


def test_when_all_are_damaged_nothing_is_loaded(two):
    checkpoints, _ = two
    for path in checkpoints.directory.iterdir():
        (path / "state.json").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(RunError, match="none of the 2 checkpoints"):
        checkpoints.newest()


def test_a_newer_schema_is_an_error_and_not_skipped(two):
    checkpoints, _ = two
    path = checkpoints.newest().path
    manifest = json.loads((path / "manifest.json").read_text())
    write_json(path / "manifest.json", {**manifest, "schema": 2})
    with pytest.raises(
        RunError, match=r"schema 2, but this version of batchwright reads up to 1.*Nothing was loaded"
    ) as caught:
        checkpoints.newest()
    assert caught.value.nearest == (1,)


def test_a_checkpoint_is_never_overwritten_and_never_visible_before_it_is_complete(two):
    checkpoints, _ = two
    model, optimizer = made()
    with pytest.raises(RunError, match="exists already, and is never overwritten"):
        checkpoints.save(model, optimizer, step=2, position=16)
    seen = []

    def look() -> bool:  # called a second time right before the rename
        seen.append(sorted(p.name[:8] for p in checkpoints.directory.iterdir()))
        return True

    Checkpoints(checkpoints.directory, may_save=look).save(model, optimizer, step=3, position=24)
    assert seen == [["step-000"] * 2, [".partial", *["step-000"] * 2]]
    # Of a process that was killed during a save.
    (checkpoints.directory / ".partial-step-000000000009-launch-00000").mkdir()
    assert checkpoints.newest().step == 3


@pytest.mark.parametrize("allowed", [0, 1])
def test_the_fence_is_checked_before_the_save_and_before_the_rename(two, allowed):
    checkpoints, _ = two
    answers = iter([True] * allowed + [False])
    fenced = Checkpoints(checkpoints.directory, may_save=lambda: next(answers))
    with pytest.raises(EnvironmentFault, match="was not written: a newer launch has taken over"):
        fenced.save(*made(), step=3, position=24)
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == [
        "step-000000000001-launch-00000",
        "step-000000000002-launch-00000",
    ]


@pytest.fixture
def disk(tmp_path):
    """A real file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing("may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_reported_and_the_checkpoint_before_is_used(disk, asynchronous):
    checkpoints = Checkpoints(disk, asynchronous=asynchronous)
    model, optimizer = made(size=16)
    checkpoints.save(model, optimizer, step=1, position=8)
    checkpoints.wait()
    with pytest.raises(
        EnvironmentFault, match=r"of 1,048,576 bytes are free: No space left .* before it are untouched"
    ):
        checkpoints.save(*made(size=512), step=2, position=16)
        checkpoints.wait()
    assert [p.name for p in disk.iterdir()] == ["step-000000000001-launch-00000"]
    fresh, other = made(seed=2)
    checkpoints.load(checkpoints.newest(), fresh, other)
    assert equal(model, fresh)
    checkpoints.save(model, optimizer, step=3, position=24)  # a smaller one fits
    checkpoints.wait()


def test_a_read_only_directory_is_reported(disk):
    checkpoints = Checkpoints(disk)
    model, optimizer = made()
    checkpoints.save(model, optimizer, step=1, position=8)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(EnvironmentFault, match=r"Read-only file system.*untouched.*Mount it writable"):
        checkpoints.save(model, optimizer, step=2, position=16)
    assert checkpoints.newest().position == 8


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_raised_on_all(tmp_path):
    for kind, message, newest, *names in call(2, "fail_on_one_rank", str(tmp_path)):
        assert kind == "EnvironmentFault" and "No space left" in message
        assert names == [newest] == ["step-000000000001-launch-00000"]


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch '{self.path}'",))


def _hostile(kind: str, ran: Path, folder: Path) -> bytes:
    good = (folder / ".metadata").read_bytes()
    if kind == "reduce":
        return pickle.dumps(_Evil(ran))
    if kind == "inside":
        metadata = pickle.loads(good)
        metadata.planner_data = _Evil(ran)
        return pickle.dumps(metadata)
    if kind == "builtin":
        return b"cbuiltins\nexec\n(S'open(" + repr(str(ran)).encode() + b', "w")' + b"'\ntR."
    if kind == "dotted":  # a function that an allowed module has imported
        return pickle.dumps("torch.serialization")[:2] + b"\x8c\x13torch.serialization\x8c\x09os.system\x93\x94."
    if kind == "getattr":  # an attribute of a class, then a call of it
        return b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nS'mro'\ntR(tR."
    if kind == "getattr of a class":
        return (
            b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nS'touch'\ntR(cpathlib\nPosixPath\n(S'"
            + str(ran).encode()
            + b"'\ntRtR."
        )
    if kind == "class":  # BUILD with (None, {...}) sets attributes, here of a class
        return b"cpathlib\nPosixPath\n(N(dS'_planted'\nS'x'\nstb."
    if kind == "instance":
        return b"cpathlib\nPosixPath\n(S'a'\ntR(N(dS'_str'\nS'/etc/passwd'\nstb."
    if kind == "not metadata":
        return pickle.dumps({"a": 1})
    metadata = pickle.loads(good)
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../../../etc/passwd")
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    "kind",
    [
        "reduce",
        "inside",
        "builtin",
        "dotted",
        "getattr",
        "getattr of a class",
        "class",
        "instance",
        "not metadata",
        "path",
    ],
)
def test_a_hostile_metadata_runs_nothing(two, tmp_path, kind):
    checkpoints, _ = two
    path, ran = checkpoints.newest().path, tmp_path / "it ran"
    (path / "tensors" / ".metadata").write_bytes(_hostile(kind, ran, path / "tensors"))
    resign(path)
    saved = checkpoints.newest()  # the manifest matches: it is not a signature
    model, optimizer = made(seed=4)
    before = [p.detach().clone() for p in model.parameters()]
    says = {"class": "__setstate__.* missing 1 required", "instance": "PosixPath where Metadata is expected"}.get(
        kind, ""
    )
    with pytest.raises(RunError, match=rf"\.metadata.*{says}"):
        checkpoints.load(saved, model, optimizer)
    assert not ran.exists() and not hasattr(type(path), "_planted")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_metadata_without_a_tensors_place_is_an_error_of_the_checkpoint(two):
    checkpoints, _ = two
    path = checkpoints.newest().path / "tensors" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data.popitem()
    path.write_bytes(pickle.dumps(metadata))
    resign(path.parent.parent)
    with pytest.raises(RunError, match=r"cannot be read: KeyError.*do not train it"):
        checkpoints.load(checkpoints.newest(), *made(seed=4))


class _Older(pickle.Pickler):
    """Writes the member of an enumeration as Python 3.11.0 to 3.11.3 (Debian 12) do: as a call of getattr."""

    def reducer_override(self, obj: object):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_that_an_older_python_wrote_is_read(two):
    checkpoints, _ = two
    path = checkpoints.newest().path
    model, optimizer = made(seed=5)
    checkpoints.load(checkpoints.newest(), model, optimizer)
    written = io.BytesIO()
    _Older(written).dump(pickle.loads((path / "tensors" / ".metadata").read_bytes()))
    assert b"getattr" in written.getvalue()
    (path / "tensors" / ".metadata").write_bytes(written.getvalue())
    resign(path)
    other, optimizer = made(seed=4)
    checkpoints.load(checkpoints.newest(), other, optimizer)
    assert equal(model, other)


def test_a_hostile_tensor_runs_nothing(two, tmp_path):
    checkpoints, _ = two
    path, ran = checkpoints.newest().path, tmp_path / "it ran"
    metadata: Metadata = tensors.SafeReader(path / "tensors").read_metadata()
    name = "tensors/__0_0.distcp"
    data = bytearray((path / name).read_bytes())
    for info in metadata.storage_data.values():  # every tensor is a zip of torch.save with a pickle in it
        with zipfile.ZipFile(io.BytesIO(data[info.offset : info.offset + info.length])) as archive:
            inner = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            pickled = archive.read(inner)
        evil = pickle.dumps(_Evil(ran), protocol=2)
        at = data.find(pickled, info.offset)
        data[at : at + len(pickled)] = evil[:-1].ljust(len(pickled) - 1, b"0")[: len(pickled) - 1] + b"."
    (path / name).write_bytes(data)
    resign(path)
    with pytest.raises(RunError):
        checkpoints.load(checkpoints.newest(), *made(seed=4))
    assert not ran.exists()


@pytest.mark.slow
def test_checkpoints_reshard_over_ranks_and_strategies(tmp_path):
    for writer, ranks in (("ddp", 2), ("fsdp2", 4), ("none", 1)):
        directory = str(tmp_path / writer)
        before = call(ranks, "save_as", directory, writer, writer == "fsdp2")[0]  # fsdp2: asynchronously
        for reader, others in (("fsdp2", 2), ("ddp", 4), ("none", 1)):
            for after in call(others, "load_as", directory, reader)[:1]:
                assert before.keys() == after.keys()
                for name, value in before.items():
                    assert (
                        np.array_equal(after[name], value)
                        if isinstance(value, np.ndarray)
                        else (
                            tuple(after[name]) == tuple(value)
                            if isinstance(value, (list, tuple))
                            else after[name] == value
                        )
                    ), name


def test_an_asynchronous_save_keeps_its_values_and_the_next_one_waits(tmp_path):
    model, optimizer = made(size=256)
    go_on = threading.Semaphore(0)
    checkpoints = Checkpoints(tmp_path, asynchronous=True, may_save=lambda: go_on.acquire(timeout=600))
    kept = made(size=256)[0]
    kept.load_state_dict(model.state_dict())
    assert checkpoints.save(model, optimizer, step=1, position=8) is None
    assert checkpoints.busy
    with torch.no_grad():
        model[0].weight.zero_()
    threading.Timer(0.2, go_on.release, (2,)).start()  # twice for the first save, and not for the second
    checkpoints.save(model, optimizer, step=2, position=16)  # waits for the first
    assert [p.name for p in tmp_path.iterdir() if "partial" not in p.name] == ["step-000000000001-launch-00000"]
    go_on.release(2)
    assert checkpoints.wait().step == 2 and not checkpoints.busy
    fresh, other = made(seed=1, size=256)
    shutil.rmtree(tmp_path / "step-000000000002-launch-00000")
    checkpoints.load(checkpoints.newest(), fresh, other)
    assert equal(kept, fresh)


def test_another_model_or_optimizer_is_refused_with_names(two):
    checkpoints, _ = two
    saved = checkpoints.newest()
    with pytest.raises(RunError, match=r"model/0.weight is \(8, 8\) here, \(16, 16\) there.*Nothing was loaded"):
        checkpoints.load(saved, *made(size=8))
    model, _ = made()
    with pytest.raises(RunError, match=r"optimizer/state/0.weight/exp_avg is missing here"):
        checkpoints.load(saved, model, torch.optim.SGD(model.parameters(), lr=0.1))

    class Odd(nn.Linear):
        def get_extra_state(self):
            return {1, 2}

        def set_extra_state(self, state):
            pass

    odd = Odd(2, 2)
    with pytest.raises(RunError, match="_extra_state of type set cannot be saved"):
        checkpoints.save(odd, torch.optim.SGD(odd.parameters(), lr=0.1), step=3, position=24)
    with pytest.raises(PlanError, match="keep=0: must be at least 1"):
        Checkpoints(checkpoints.directory, keep=0)


def test_fingerprints_tell_what_changed_and_what_it_means():
    class Drawn:  # random numbers are no change, other content is
        def __init__(self, start: int) -> None:
            self.start = start

        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int):
            return {"x": torch.rand(2) + self.start + i, "text": f"{i}", "n": np.arange(3)}

    model = nn.Linear(2, 2)
    assert dataset_digest(Drawn(0), 40) == dataset_digest(Drawn(0), 40) != dataset_digest(Drawn(1), 40)
    order, schedule = GlobalOrder(40, seed=1), Constant(8).compile()
    one = fingerprint(order, schedule, model, dataset_digest(Drawn(0), 40), ranks=1)
    assert changes(one, json.loads(json.dumps(one)), 8) == ()
    other = dataset_digest(Drawn(1), 40)
    two = fingerprint(GlobalOrder(40, seed=2), Constant(16).compile(), nn.Linear(2, 3), other, ranks=4)
    found = {c.field: c for c in changes(one, two, 8)}
    assert {f: c.severity for f, c in found.items()} == {
        "seed": "breaks",
        "dataset": "breaks",
        "schedule": "changes",
        "model": "changes",
        "ranks": "free",
    }
    assert "position 8 no longer says which samples were trained" in found["dataset"].message


def test_seeds_of_a_rank_are_a_function_of_position_and_rank():
    drawn = []
    for position, rank in ((8, 0), (8, 1), (16, 0), (8, 0)):
        generators.seed_rank(7, position, rank)
        drawn.append((float(torch.rand(())), float(np.random.rand())))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_a_parameter_that_never_had_a_gradient_can_be_resumed(tmp_path):
    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = built(0)
    model["used"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(model, optimizer, step=1, position=8)
    fresh, other = built(1)
    checkpoints.load(saved, fresh, other)
    assert equal(model, fresh)
    assert {id(p) for p in other.state} == {id(p) for p in fresh["used"].parameters()}
    again = checkpoints.save(fresh, other, step=2, position=16)
    one, two = (tensors.read(s.path / "tensors") for s in (saved, again))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    # If no state at all is stored, the optimizer is another one.
    plain = checkpoints.save(model, torch.optim.SGD(model.parameters(), lr=0.1), step=3, position=24)
    with pytest.raises(RunError, match="exp_avg is missing there"):
        checkpoints.load(plain, *built(2))


def test_incomplete_folders_of_earlier_launches_are_deleted(tmp_path):
    left = [f".partial-step-000000000009-launch-0000{n}" for n in (1, 2, 3)] + [
        ".partial-old-step-000000000001-launch-00009"
    ]
    for name in left:
        (tmp_path / name / "tensors").mkdir(parents=True)
    model, optimizer = made()
    Checkpoints(tmp_path).save(model, optimizer, step=4, position=8, launch=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*left[1:3], "step-000000000004-launch-00002"]


@pytest.mark.parametrize("value", [torch.tensor(1.5), torch.ones(2, 3), torch.ones(4, 3).t()])
def test_half_precision_samples_have_a_digest(value):
    def digest(dtype) -> str | None:
        return dataset_digest([value.to(dtype)], 1)

    assert digest(torch.bfloat16) == digest(torch.bfloat16) != digest(torch.float32)
    assert digest(torch.bfloat16) != dataset_digest([value.to(torch.bfloat16) + 1], 1)


def test_a_link_in_place_of_an_incomplete_checkpoint_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    folder = tmp_path / "checkpoints"
    first = Checkpoints(folder).save(model, optimizer, step=1, position=8)
    (folder / f".partial-{first.name.replace('0001-', '0002-')}").symlink_to(elsewhere)
    saved = Checkpoints(folder).save(model, optimizer, step=2, position=16)
    assert saved.path.is_dir() and not saved.path.is_symlink() and not list(elsewhere.iterdir())
