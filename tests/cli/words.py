"""The words of fuzzed command lines: flags and keys of the commands themselves, values that fit them, and junk.

A new flag, key of a section or key of a framework is used without a change here: its values are the names that its help
lists, or those of `VALUES`, or numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from random import Random
from typing import Any

import click
import yaml

from batchwright.cli import GROUPS
from batchwright.cli.config import SECTIONS
from batchwright.core.batch.request import READERS
from batchwright.core.nodes.policies import POLICIES
from batchwright.core.ramp.recipes import RECIPES
from batchwright.core.ramp.request import RAMP_READERS
from batchwright.dialects import dialects
from batchwright.launch.settings import _OWN, TASK_KEYS
from batchwright.launch.settings import READERS as LAUNCH
from batchwright.launch.slurm.site import _READERS as SITE
from batchwright.runtime.loop.settings import Settings

VERBS = {name: import_module(f"batchwright.cli.{name}").command for group in GROUPS.values() for name in group}
OPTIONS = {
    verb: {o.opts[0]: o for o in command.params if isinstance(o, click.Option) and o.name != "as_json"}
    for verb, command in VERBS.items()
}
FOREIGN = sorted({key for d in dialects() for key in (*d.keys, *d.special)})
KEYS = sorted({*READERS, *RAMP_READERS, *FOREIGN})
DOTTED = sorted(
    {
        *(f"{section}.{name}" for section, names in SECTIONS.items() for name in names),
        *(f"launch.{name}" for name in (*LAUNCH, "dir", "command", "position_command")),
        *(f"launch.slurm.{name}" for name in SITE),
        *(f"task.{name}" for name in (*TASK_KEYS, "args.width")),
        *(f"task.settings.{field.name}" for field in fields(Settings)),
    }
)
# Settings of the loop that a run does not set itself, with values that are valid.
SETTINGS = {f.name: f.default for f in fields(Settings) if f.name not in ("directory", *_OWN)}
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 30, 32, 60, 64, 96, 100, 128, 1000, 1024, 4096, 10_000, 2**20)
SECONDS = ("0.5", "2", "30", "1e3", "0.001")
JUNK = (
    "", " ", "0", "-1", "-0", "1.5", "1e400", "1" + "0" * 400, "9" * 5000, "nan", "inf", "-inf", "1e-320", "1e-999", "4M",
    "4Mi", "4X", "1/8", "1/0", "0x10", "1_0", "1,000", "1,5", "٤", "½", "🦊", "a\nb", "\n", "\t", "\x1b[31m", "\ud800", "\udcff",
    "true", "false", "None", "null", "~", "[]", "{}", "[1, 2]", "{a: 1}", "{1: 2}", "[[[[", "&a [*a]", "[" * 3000,
    "!!python/name:os.system", "10%", "-5%", "--", "-", "=", "a=b", "a=b=c", "nemo", "python", "%s", "{0}", "{nodes}",
    "{nope}", "..", "../..", "/", ".", "~nobody-here/x", "~nobody-here/x.py", "/dev/null", "/dev/zero", "fifo.yaml",
    "fifo.py", "folder", "loop.yaml", "binary.yaml", "huge.yaml", "999999999989", "1000000", "1T", "0:1 1:2", "0:8",
    "0:8 0:8", "0:8 9:4", "1,2,3", "1,2", ",", ",,,", "0,0,0", "1,1,1", "1,0,5", "1,1,1T", "x" * 300, "x" * 300 + ".py",
    "x/" * 2000, "'", '"', "a'b", "`x`", "$(x)", "train.py:task", "train.py", "train.py:nope", "wrong.py:task",
    "missing.py:task", ":", "a:b", "2020-01-01", "24:00:00", "1:30",
)  # fmt: skip
# Values that are often valid, for what `help` does not name; each is chosen by a field's or flag's name.
VALUES: Mapping[str, Sequence[object]] = {
    "--linear": ("16,16,96", "256,128,50M", "8,8,1000", "1,1,10", "64,0,0"),
    "--per-device": ("1,1,4,1000", "4.0,2.0,12.0,500", "1,0.5,2,96"),
    "--thresholds": ("0:8 64:16 192:32", "0:256 500K:512", "0:4", "0:6 60:12 240:24"),
    "--thresholds-tokens": ("0:8 64K:16", "0:768 250B:1536"),
    "--thresholds-steps": ("0:8 10:16", "0:4 5:8 20:16"),
    "--doubling": ("8,1000", "16,10,steps", "4,1M,tokens", "8,100,samples"),
    "--recipe": [r.name for r in RECIPES],
    "--sequence-lengths": ("512,1024,2048", "128,128", "64"),
    "--node-policy": POLICIES,
    "--micro-step-seconds": ("0.02,0.01", "0,0.5", "1"),
    "--sync-seconds": ("0.001,0.1", "0,0", "0.5"),
    "--stage-seconds": ("0.5,0.6,0.7", "1,2", "3"),
    "--lr": ("3e-4", "0.1", "1"),
    "--optimizer": ("adam", "sgd", "lion", "other"),
    "--compare": ("linear,maxtext", "nemo,megatron", "per-device,linear"),
    "--expansion-factor": ("1", "2", "1/2", "0.25", "3", "-1"),
    "--tolerance": ("0%", "1%", "10%", "100%", "0.2"),
    "--from-probe": ("probe.json",),
    "--site": ("site.yaml",),
    "--dir": ("made", "made/deep", "a 'dir'"),
    "--resume": ("done", "damaged", "folder", "made"),
    "--status": ("done", "damaged", "folder", "made"),
    "--stop": ("done", "damaged", "folder", "made"),
    "--ledger": ("folder", "done", "damaged", "missing"),
    "--arg": ("width=4", "width=[1, 2]", "lr=1e-4", "name=x", "width=" + "[" * 50, "x=NaN"),
    "--env": ("A=1", "TOKEN=a b", "A=", "B=c=d"),
    "--position-command": ("true", "where {run_dir}", "cat 'x y'"),
    "--stop-signal": ("SIGTERM", "usr1", "INT"),
    "--stall-seconds": ("never", "60"),
    "--memory": ("2GiB", "80G", "512MB", "1Ti"),
    "--margin": ("0", "1MiB", "512B"),
    "--device": ("cpu", "h100-80g", "list", "a100-40g"),
    "--micro-batch-size": ("1", "2", "4", "1,2,4"),
    "--sequence-length": ("128", "1024", "1024,2048"),
    "--precision": ("fp32", "bf16", "bf16-pure"),
    "--model": ("./missing", "./folder"),
    "--task": ("train.py:task", "train.py:nope"),
    "--fragmentation": ("3%", "0%", "0.1"),
    "--context": ("0", "512MiB"),
    "--workspaces": ("0", "256MiB"),
    "--step-regex": (r"step (\d+)", "it.*", "(", "(a+)+$"),
    "--ramp": ("0:256 10M:512", "0:4 16:8"),
    "--allow": ("batch-norm", "precision", "mean-of-means"),
    "--accumulate-dtype": ("float32", "float64"),
    "launch.environment": ({"A": "1"}, {"TOKEN": "a b", "N": 5}),
    "launch.settings": ({},),
    "launch.slurm": ({"partition": "gpu", "time": "24:00:00"}, {"sbatch": ["--mem=0"]}),
    "launch.dir": ("made",),
    "launch.command": ("echo x", ["train", "{nodes}"], "train --batch {global_batch_size}"),
    "launch.position_command": ("true",),
    "launch.engine": ("local", "slurm"),
    "launch.strategy": ("auto", "ddp", "fsdp2", "none"),
    "launch.stop_signal": ("SIGTERM", "usr1"),
    "launch.stall_seconds": ("never", 60),
    "launch.slurm.name": ("my run", "x"),
    "launch.slurm.time": ("24:00:00", "1-12", "90", "UNLIMITED", 86400),
    "launch.slurm.gres": ("gpu:8",),
    "launch.slurm.container": ("image.sqsh", ["apptainer", "exec", "image"]),
    "launch.slurm.container_mounts": (["/data:/data"],),
    "launch.slurm.prologue": ("module load cuda", ["module load cuda", "echo 'a b'"]),
    "launch.slurm.sbatch": (["--exclusive", "#SBATCH --mem=0"], "--mem=0"),
    "launch.slurm.srun": (["--mpi=pmix"],),
    "launch.slurm.launcher": ("srun", "torchrun"),
    "launch.slurm.nodes_submit": (True, False),
    "launch.slurm.elastic": (True, False),
    "task.target": ("train.py:task", "train.py"),
    "task.args": ({"width": 4}, {}),
    "task.settings": ({"max_norm": 1.0}, {"seed": 3, "keep": 2}, {"num_workers": 0, "lr_scaling": "sqrt"}),
}  # fmt: skip
_LISTED = re.compile(r"[\w-]+(?: \| [\w-]+)+")


def maybe(random: Random, share: float = 0.5) -> bool:
    return random.random() < share


def number(random: Random) -> str:
    return str(random.choice(SIZES))


def junk(random: Random) -> str:
    return random.choice(JUNK) if maybe(random, 0.8) else "".join(chr(random.randrange(1, 0x300)) for _ in range(5))


def value_of(random: Random, name: str, option: click.Option | None = None) -> Any:
    """A value that a flag (or a key `section.name`) may well accept."""
    if name in VALUES:
        return random.choice(list(VALUES[name]))
    flag = f"--{name.rpartition('.')[2].replace('_', '-')}"
    if flag in VALUES:
        return random.choice(list(VALUES[flag]))
    if option is not None and (listed := _LISTED.search(option.help or "")):
        return random.choice(listed[0].split(" | "))
    if flag.endswith(("-seconds", "-hours", "-budget", "-second")) or (
        option and option.metavar in ("S", "X", "H", "NH")
    ):
        return random.choice(SECONDS)
    return number(random)


def damage(random: Random, tree: Any) -> Any:
    """A tree with one place replaced by junk, removed, or moved deeper."""
    if isinstance(tree, (dict, list)) and tree and maybe(random, 0.85):
        places = list(tree) if isinstance(tree, dict) else range(len(tree))
        at = random.choice(list(places))
        made = dict(tree) if isinstance(tree, dict) else list(tree)
        made[at] = damage(random, made[at])
        if maybe(random, 0.1):
            del made[at]
        return made
    return random.choice(
        (
            junk(random),
            None,
            True,
            -1,
            0,
            1.5,
            10**20,
            10**400,
            -(2**70),
            float("nan"),
            float("inf"),
            [],
            {},
            [tree],
            {"a": tree},
            {"1": 2},
            {1: tree},
            [1, "a", None],
        )
    )


def text_of(random: Random, tree: Mapping[Any, Any], kind: str, wrong: bool = False) -> bytes:
    """A file; if `wrong`, mostly one that is damaged."""
    if wrong and maybe(random, 0.7):
        tree = damage(random, tree)
    text = _toml(tree) if kind == "toml" and isinstance(tree, dict) else _dumped(tree, kind)
    if wrong and maybe(random, 0.2):
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice(("", junk(random), "\x00", "\t", "{", "]", ": "))
            + text[at + random.randrange(3) :]
        )
    return text.encode("utf-8", "surrogatepass")


def _dumped(tree: Any, kind: str) -> str:
    if kind == "json":
        return json.dumps(tree)
    try:
        return yaml.safe_dump(tree, allow_unicode=True)
    except ValueError:  # a number of too many digits
        return "a: 1"


def _toml(tree: Mapping[Any, Any], path: str = "") -> str:
    """Enough of TOML for the sections of a project file."""
    plain = [
        f"{json.dumps(str(k))} = {json.dumps(v)}" for k, v in tree.items() if not isinstance(v, dict) and v is not None
    ]
    text = "\n".join(([f"[{path}]"] if path else []) + plain) + "\n"
    for key, inner in tree.items():
        if isinstance(inner, dict):
            text += _toml(inner, ".".join(filter(None, (path, json.dumps(str(key))))))
    return text
