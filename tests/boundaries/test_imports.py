"""The rooms and who may import whom, what a light command may load, what is exported, how long a module may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import batchwright
from batchwright.rundir.trackers import TRACKERS
from tests.needs import needs

SRC = Path(batchwright.__file__).parent
MODULES = sorted(SRC.rglob("*.py"))
ROOMS = {p.name for p in SRC.iterdir() if (p / "__init__.py").exists()}
# What each room may import of the others. `api` and `__main__` are the front door, outside all rooms.
ALLOWED = {
    "core": {"core"},
    "rundir": {"core", "rundir"},
    "processes": {"core", "processes"},
    "dialects": {"core", "dialects"},
    "report": {"core", "rundir", "report"},
    "launch": {"core", "rundir", "processes", "report", "launch"},
    "probe": {"core", "rundir", "processes", "report", "probe"},
    "estimate": {"core", "rundir", "processes", "runtime", "jax", "report", "estimate"},
    "runtime": {"core", "rundir", "processes", "runtime"},
    "adapters": {"core", "rundir", "processes", "runtime", "adapters"},
    "jax": {"core", "rundir", "processes", "runtime", "jax"},
}
# The probe's worker is the only file of its room that runs a user's task; a task may be made from another trainer. The
# prober asks for an estimate, which another process makes.
ALSO = {"probe/worker.py": {"runtime"}, "probe/prober.py": {"estimate"}, "runtime/task.py": {"adapters"}}
HEAVY = {"torch", "jax", "numpy", "yaml", "rich", "plotly", "plotext", "pandas", "transformers"} | set(TRACKERS)
THIRD_PARTY = {
    "core": set(),
    "rundir": set(),
    "processes": set(),
    "dialects": {"yaml"},
    # rich where a bar is asked for; fsspec and pyarrow in the sources
    "runtime": {"torch", "numpy", "rich", "fsspec", "pyarrow"},
    "launch": {"rich"},
    "jax": {"jax", "numpy", "optax", "orbax"},
}
# One framework per adapter, one package per tracker; what they share imports none.
FRAMEWORKS = {
    "runtime/loop/trackers/mlflow.py": {"mlflow"},
    "runtime/loop/trackers/trackio.py": {"trackio"},
    "runtime/loop/trackers/wandb.py": {"wandb"},
    "adapters/huggingface.py": {"transformers"},
    "adapters/huggingface_files.py": {"transformers"},
    "adapters/huggingface_task.py": {"transformers"},
    "adapters/lightning.py": {"lightning", "torchmetrics"},  # Lightning installs torchmetrics
    "adapters/lightning_task.py": {"lightning"},
    "adapters/lightning_files.py": {"lightning"},
}


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth of its code, as absolute names."""
    package = ("batchwright", *path.relative_to(SRC).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


def room_of(path: Path) -> str | None:
    first = path.relative_to(SRC).parts[0]
    return first if first in ROOMS else None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_keep_to_the_rooms(path):
    room = room_of(path)
    used = imports(path)
    rooms = {name.split(".")[1] for name in used if name.startswith("batchwright.")} & ROOMS
    if room in ALLOWED:
        assert rooms <= ALLOWED[room] | ALSO.get(path.relative_to(SRC).as_posix(), set())
    if room not in ("cli", "web", None):
        assert not rooms & {"cli", "web"}
    if room in THIRD_PARTY:
        outside = {name.split(".")[0] for name in used} - set(sys.stdlib_module_names) - {"batchwright"}
        assert outside <= THIRD_PARTY[room] | FRAMEWORKS.get(path.relative_to(SRC).as_posix(), set())
    if room == "adapters":
        outside = (
            {name.split(".")[0] for name in used} - set(sys.stdlib_module_names) - {"batchwright", "torch", "numpy"}
        )
        assert outside <= FRAMEWORKS.get(path.relative_to(SRC).as_posix(), set())


def test_every_extra_installs_only_what_is_imported():
    project = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = {name.split(".")[0].lower() for path in MODULES for name in imports(path)}
    imported.add("accelerate")  # of transformers[torch]: the Trainer's; the extra has a newer lower bound
    for extra, packages in project["optional-dependencies"].items():
        names = {re.split(r"[^\w-]", package)[0].lower() for package in packages} - {"batchwright"}
        modules = {{"vl-convert-python": "vl_convert", "orbax-checkpoint": "orbax"}.get(name, name) for name in names}
        assert extra == "dev" or modules <= imported, extra


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_modules_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def test_the_median_module_is_short():
    lengths = sorted(len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES)
    assert lengths[len(lengths) // 2] <= 200


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_the_environment_is_read_in_its_places_only(path):
    relative = path.relative_to(SRC).as_posix()
    # Children get their environment from `launch` and `processes/start.py`; ranks and adapted scripts read theirs.
    if relative.startswith("launch/") or relative in ("runtime/ranks.py", "processes/start.py", "adapters/course.py"):
        return
    names = {
        node.attr for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
    }
    assert not names & {"environ", "getenv", "environb"}


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.split(".")[0] for name in done.stderr.split()}


RUN = "from batchwright.cli import main\ntry: main({!r})\nexcept SystemExit as e: assert e.code == 0, e.code"


@pytest.mark.parametrize(
    "code",
    [
        "import batchwright; batchwright.plan(micro_batch_size=4, accumulation_steps=8, devices=2)",
        RUN.format(["--help"]),
        RUN.format(["plan", "--global-batch-size", "64", "--devices", "8"]),
        RUN.format(["plan", "data.micro_batch_size=4", "data.global_batch_size=16", "--json"]),
        RUN.format(["rl", "--prompts", "8", "--generations", "4"]),
    ],
)
def test_light_commands_load_nothing_heavy(code):
    assert not loaded_after(code) & HEAVY


def test_the_jax_room_loads_no_torch():
    needs("orbax")
    modules = [f"batchwright.jax.{path.stem}" for path in (SRC / "jax").glob("*.py") if path.stem != "__init__"]
    loaded = loaded_after(f"import {', '.join(modules)}")
    assert "jax" in loaded and not loaded & {"torch", "transformers", "lightning"}


@pytest.mark.torch
def test_the_runtime_loads_no_jax():
    loaded = loaded_after("import batchwright.runtime.loop.train, batchwright.runtime.check.compare")
    assert "torch" in loaded and not loaded & {"jax", "optax", "orbax"}


def test_import_alone_loads_no_room():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, batchwright; print(*[m for m in sys.modules if m.startswith('batchwright.')])",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []


@pytest.mark.torch  # `check` and `train` are imported with it
def test_exported_names_are_importable_sorted_and_all_there_is():
    names = [name for name in batchwright.__all__ if name != "__version__"]
    assert names == sorted(names)
    for name in names:
        assert getattr(batchwright, name).__doc__, name
    # Two packages have the name of their verb: it can be called before and after they are imported.
    assert callable(batchwright.probe) and callable(batchwright.estimate)
    assert dir(batchwright) == sorted(batchwright.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = batchwright.nothing
