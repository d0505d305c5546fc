"""Command lines for fuzzing, of every verb: some valid, some nearly, some nonsense. `line(random, verb)` makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from batchwright.cli.config import SECTIONS
from batchwright.dialects import framework, frameworks
from batchwright.dialects.editing import nested
from batchwright.launch.settings import READERS as LAUNCH
from batchwright.launch.work import PLACEHOLDERS
from tests.cli.requests import batch, growing, loop_settings, probed, rates, site
from tests.cli.words import DOTTED, FOREIGN, KEYS, OPTIONS, junk, maybe, number, text_of, value_of
from tests.report.material import documents


@dataclass
class Line:
    """One command line, and the files that it names."""

    argv: list[str]
    files: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.argv!r} {self.files!r}"


# --- a request as arguments and files ---------------------------------------------------------------------------------


def spread(
    random: Random, verb: str, fields: Mapping[str, Any], extra: Mapping[str, Any] | None = None, wrong: bool = False
) -> Line:
    """A request in flags, `key=value`, `section.key=value` and a file with sections; `extra` are further sections."""
    made = Line([verb])
    style = random.choice(("flags", "flags", "keys", "dotted", "file", "mixed"))
    tree: dict[str, Any] = {name: dict(part) for name, part in (extra or {}).items()}
    words: list[list[str]] = []
    homes = {name: section for section, names in SECTIONS.items() for name in names}
    for name, value in fields.items():
        flag = f"--{name.replace('_', '-')}"
        how = random.choice(("flags", "keys", "dotted", "file")) if style == "mixed" else style
        if how == "file" and name in homes:
            tree.setdefault(homes[name], {})[name] = value if isinstance(value, (int, float, str)) else str(value)
        elif how == "dotted" and name in homes:
            words.append([f"{homes[name]}.{name}={value}"])
        elif how == "keys" or flag not in OPTIONS[verb]:
            words.append([f"{name}={value}"])
        elif OPTIONS[verb][flag].is_flag:
            words.append([flag])
        else:
            words.append([f"{flag}={value}"] if maybe(random, 0.2) else [flag, str(value)])
    if tree:
        kind = random.choice(("yaml", "yml", "json", "toml"))
        made.files[f"project.{kind}"] = text_of(random, tree, kind, wrong)
        words.append([f"project.{kind}"])
    random.shuffle(words)
    made.argv += [word for pair in words for word in pair]
    return made


def pasted(random: Random, verb: str) -> Line:
    """The command line of another program."""
    micro, steps, nodes, each = (random.choice((1, 2, 4)) for _ in range(4))
    per_node, whole = random.choice((1, 2, 8)), micro * steps * nodes * each
    environment = [random.choice(("CUDA_VISIBLE_DEVICES=0,1", "NCCL_DEBUG=INFO", "A=", "OMP_NUM_THREADS=8"))] * maybe(
        random, 0.4
    )
    starter = random.choice(
        (
            ["torchrun", f"--nproc_per_node={per_node}", "--nnodes", str(nodes), "--rdzv-backend=c10d", "train.py"],
            ["torchrun", "--nproc-per-node", str(per_node), "-m", "package.train"],
            ["srun", "-N", str(nodes), f"--ntasks-per-node={per_node}", "python", "-u", "train.py"],
            ["srun", f"-N{nodes}", "-n", str(nodes * per_node), "--mpi=pmix", "./run.sh"],
            [
                "accelerate",
                "launch",
                "--num_processes",
                str(nodes * per_node),
                "--num_machines",
                str(nodes),
                "train.py",
            ],
            ["deepspeed", "--num_gpus", str(per_node), "--num_nodes", str(nodes), "train.py", "--deepspeed", "ds.json"],
            ["python", "-m", "torch.distributed.run", f"--nproc_per_node={per_node}", "train.py"],
            ["python3", "train.py"],
            ["/usr/bin/python", "-m", "MaxText.train", "base.yml"],
            ["nemo", "llm", "pretrain", "--factory", f"llama3_8b(num_nodes={nodes}, num_gpus_per_node={per_node})"],
        )
    )
    arguments = random.choice(
        (
            [
                "--per_device_train_batch_size",
                str(micro),
                "--gradient_accumulation_steps",
                str(steps),
                "--output_dir",
                "x",
            ],
            [
                f"--micro-batch-size={micro}",
                "--global-batch-size",
                str(whole * per_node),
                "--seq-length",
                "2048",
                "--bf16",
            ],
            [
                "--micro-batch-size",
                str(micro),
                "--global-batch-size",
                str(whole * 8),
                "--rampup-batch-size",
                str(micro * 8),
                str(micro * 8),
                "1000",
            ],
            [
                f"data.micro_batch_size={micro}",
                f"data.global_batch_size={whole * per_node}",
                f"++trainer.num_nodes={nodes}",
                f"trainer.devices={per_node}",
            ],
            [
                f"per_device_batch_size={micro}",
                f"gradient_accumulation_steps={steps}",
                "ici_fsdp_parallelism=-1",
                "max_target_length=2048",
                f"devices={nodes * per_node}",
            ],
            [
                "--tensor-model-parallel-size",
                "2",
                "--micro-batch-size",
                str(micro),
                "--train-iters",
                "100",
                "--lr",
                "3e-4",
            ],
        )
    )
    line = Line([verb, *environment, *starter, *arguments])
    if maybe(random, 0.2):
        line.files["base.yml"] = text_of(
            random, {"per_device_batch_size": micro, "model_name": "default", "steps": 10}, "yaml", maybe(random)
        )
    for _ in range(random.choice((0, 0, 1, 2))):
        key = random.choice(FOREIGN)
        line.argv += random.choice(
            ([f"--{key}", number(random)], [f"{key}={number(random)}"], [f"--{key.replace('_', '-')}={junk(random)}"])
        )
    return line


# --- verbs ------------------------------------------------------------------------------------------------------------


def _plan(random: Random, wrong: bool) -> Line:
    if maybe(random, 0.25):
        return pasted(random, "plan")
    line = spread(random, "plan", batch(random), wrong=wrong)
    if maybe(random, 0.15):
        line.argv += ["--tolerance", random.choice(("5%", "20%", "0.1"))]
    return _with_probe(random, line, wrong) if maybe(random, 0.15) else line


def _ramp(random: Random, wrong: bool) -> Line:
    if maybe(random, 0.02):
        return Line(["ramp", "--list-recipes"])
    if maybe(random, 0.1):
        return pasted(random, "ramp")
    if maybe(random, 0.07):
        samples, top = random.choice((96, 5000)), random.choice((64, 1024))
        return Line(["ramp", f"--linear=16,16,{samples}", f"--global-batch-size={top}", "--compare", "linear,maxtext"])
    probe = maybe(random, 0.2)
    line = spread(
        random, "ramp", growing(random, probe=probe) | (rates(random) if maybe(random, 0.3) else {}), wrong=wrong
    )
    at = str(random.choice((0, 100, 9999)))
    line.argv += random.choice(([], [], [], ["--csv"], ["--plot"], ["--at", at], ["--at-step", "5"]))
    return _with_probe(random, line, wrong) if probe else line


def _with_probe(random: Random, line: Line, wrong: bool) -> Line:
    line.files["probe.json"] = text_of(random, probed(random), "json", wrong)
    line.argv += ["--from-probe", "probe.json"]
    return line


def _rl(random: Random, wrong: bool) -> Line:
    ranks, micro, updates, generations = (random.choice((1, 2, 4)) for _ in range(4))
    prompts = ranks * micro * updates * random.choice((1, 2, 3))
    fields = {"prompts": prompts, "generations": generations}
    ours = {
        "updates": updates,
        "data_parallel_size": ranks,
        "iterations": random.choice((1, 2)),
        "rounds_ahead": random.choice((0, 1)),
    }
    fields |= {name: value for name, value in ours.items() if maybe(random)}
    size = {
        "train_micro_prompts": 1,
        "train_micro_responses": 1,
        "rollout_micro_prompts": prompts,
        "micro_batch_size": prompts,
    }
    fields |= dict([random.choice(list(size.items()))]) if maybe(random) else {}
    names = {ours: theirs for theirs, ours in framework("maxtext-rl").keys.items()}
    line, tree = Line(["rl"]), {}
    for name, value in fields.items():
        how = random.randrange(5)
        if how == 0:
            tree[name] = value
        elif how == 1:
            line.argv.append(f"rl.{name}={value}" if maybe(random) else f"{name}={value}")
        elif how == 2 and name in names:
            line.argv.append(f"{names[name]}={value}")
        else:
            line.argv += [f"--{name.replace('_', '-')}", str(value)]
    if tree:
        kind = random.choice(("yaml", "json", "toml"))
        line.files[f"rl.{kind}"] = text_of(random, {"rl": tree} if maybe(random) else tree, kind, wrong)
        line.argv.append(f"rl.{kind}")
    return line


def _run(random: Random, wrong: bool) -> Line:
    if maybe(random, 0.12):
        flag = random.choice(("--status", "--resume", "--stop"))
        more = {"--stop": ["--now"], "--resume": ["--keep", "5"]}.get(flag, []) if maybe(random) else []
        return Line(["run", flag, random.choice(("done", "done", "damaged", "folder", "missing")), *more])
    command, probe, slurm = maybe(random), maybe(random, 0.15), maybe(random, 0.4)
    fields = growing(random, ends=True, probe=probe)
    names = [
        name
        for name in random.sample(sorted(LAUNCH), random.randrange(3))
        if name not in ("slurm", "settings", "engine")
    ]
    launch = {name: value_of(random, f"launch.{name}") for name in names}
    extra: dict[str, Any] = {"launch": launch} if launch else {}
    more, after = [random.choice(([], ["--dir", "made"]))], list[str]()
    if slurm:
        more += [["--engine", "slurm"] if maybe(random, 0.7) else ["launch.engine=slurm"]]
        more += [random.choice(([], [], ["--detach"], ["--elastic"], ["launch.slurm.partition=gpu"]))]
        if maybe(random):
            extra.setdefault("launch", {})["slurm"] = site(random)
    if command:
        place = "{" + random.choice(PLACEHOLDERS) + "}"
        own = ["python", "train.py", f"--batch={place}", "{{x}}"]
        after = random.choice((["true", "x"], ["train", place], own, ["sh", "-c", "echo $A"]))
        if wrong and maybe(random):
            after[random.randrange(len(after))] = junk(random)
        if maybe(random, 0.15):
            more, after = [*more, ["launch.command=" + " ".join(after)]], []
    else:  # a task is data-parallel
        fields = {name: v for name, v in fields.items() if name.split("_")[0] not in ("tensor", "pipeline", "context")}
        if maybe(random):
            more.append([_task(random, Line([]), wrong)])
        else:
            task = {"target": "train.py:task", "args": {"width": 2}, "settings": loop_settings(random, wrong)}
            extra["task"] = {name: task[name] for name in task if name == "target" or maybe(random)}
    line = spread(random, "run", fields, extra, wrong)
    if slurm and maybe(random, 0.4):
        line.files["site.yaml"] = text_of(random, site(random), "yaml", wrong)
        more.append(["--site", "site.yaml"])
    for flag in ("--env", "--arg", "--threads", "--keep", "--max-retries", "--seed", "--grace-seconds"):
        if maybe(random, 0.08):
            more.append([flag, value_of(random, flag, OPTIONS["run"].get(flag))])
    if maybe(random, 0.3 if wrong else 0.05):
        more.append([f"{random.choice(DOTTED)}={junk(random) if wrong else number(random)}"])
    if maybe(random, 0.75):
        more.append(["--dry-run"])
    line = _with_probe(random, line, wrong) if probe else line
    line.argv += [*(word for words in more for word in words), *["--"] * bool(after), *after]
    return line


def _report(random: Random, wrong: bool) -> Line:
    line = Line(["report"])
    for _ in range(random.choice((0, 1, 1, 2))):
        if maybe(random, 0.3):
            line.argv.append(random.choice(("done", "done", "damaged", "folder", "missing")))
        else:
            kind, document = random.choice(list(documents().items()))
            line.files[f"{kind}.json"] = text_of(random, dict(document), "json", wrong)
            line.argv.append(f"{kind}.json")
    outputs = (
        ["--markdown"],
        ["--markdown", "made/x.md"],
        ["-o", "made/x.html"],
        ["--svg", "made"],
        ["--png=made"],
        [],
    )
    line.argv += random.choice(outputs)
    return line


def _task(random: Random, line: Line, wrong: bool) -> str:
    """The name of a task, or of a file of `line` that names one."""
    if not line.argv or maybe(random, 0.7):
        others = ("train.py:nope", "wrong.py:task", "~nobody-here/x.py", f"{'x' * 300}.py", "fifo.py", "folder", ".py:")
        return random.choice(others) if wrong and maybe(random) else random.choice(("train.py:task", "train.py"))
    tree = {"task": {"target": "train.py:task", "args": {"width": 2}}, "batch": {"micro_batch_size": 4}}
    kind = random.choice(("yaml", "json", "toml"))
    line.files[f"task.{kind}"] = text_of(random, tree, kind, wrong)
    return f"task.{kind}"


def _measuring(verb: str, flags: str) -> Callable[[Random, bool], Line]:
    """A verb that takes a task, with some of these flags; others come by chance."""

    def make(random: Random, wrong: bool) -> Line:
        line = Line([verb])
        line.argv.append(_task(random, line, wrong))
        for flag in random.sample([f"--{name}" for name in flags.split()], random.randrange(4)):
            option = OPTIONS[verb][flag]
            line.argv += [flag] if option.is_flag else [flag, str(value_of(random, flag, option))]
        if verb == "probe" and maybe(random, 0.4):
            program = random.choice(
                (["python", "train.py"], ["true", "{steps}"], ["no-such"], ["python", "-m", "x" * 300])
            )
            more = random.choice(([], ["--limit-only"], ["--memory", "1GiB"], ["--fresh"]))
            line.argv = ["probe", *more, "--", *program, "--batch={micro_batch_size}", *[junk(random)] * wrong]
        if verb == "check" and maybe(random, 0.15):
            line = Line(["check", "--ledger", random.choice(("done", "folder", "damaged", "missing"))])
        if verb == "estimate" and maybe(random, 0.05):
            line = Line(["estimate", "--device", "list"])
        return line

    return make


def _convert(random: Random, wrong: bool) -> Line:
    """A configuration of any framework, in a file, as KEY=VALUE or as flags, for another one; or only checked."""
    dialect = random.choice(frameworks())
    keys = random.sample(
        sorted({*dialect.keys, *dialect.special, *dialect.checked, *dialect.steps}), random.randrange(1, 4)
    )
    values = {key: junk(random) if wrong and maybe(random) else random.choice((1, 2, 4, 8, 64, 256)) for key in keys}
    line = Line(["convert", "--to", random.choice([*(d.name for d in frameworks()), "megatron-lm@0.17", "nemo@1"])])
    if maybe(random, 0.3):
        line = Line(["check"])
    how = random.randrange(3)
    if how == 0:
        kind = random.choice(("yaml", "json", "toml"))
        line.files[f"c.{kind}"] = text_of(random, nested(values), kind, wrong)
        line.argv.append(f"c.{kind}")
    elif how == 1:
        line.argv += [f"{key}={value}" for key, value in values.items()]
    else:
        line.argv += ["torchrun", "t.py", *(word for key, value in values.items() for word in (f"--{key}", str(value)))]
    if maybe(random, 0.6):
        line.argv += ["--from", dialect.name]
    if maybe(random, 0.7):
        line.argv += ["--devices", random.choice(("8", "64"))]
    if line.argv[0] == "convert" and maybe(random, 0.2):
        line.files["into.yaml"] = text_of(random, {"a": 1}, "yaml", wrong)
        line.argv += ["--into", "into.yaml", "--dry-run"]
    return line


_PROBE = "memory margin max multiple-of exact ranks seconds limit-only evaluation plot arg fresh workers"
_ESTIMATE = "memory margin micro-batch-size sequence-length precision ranks calibrate arg"
_CHECK = "global-batch-size micro-batch-size seed accumulate-dtype ramp lr-horizon-steps samples allow ranks"
MAKERS: Mapping[str, Callable[[Random, bool], Line]] = {
    "plan": _plan,
    "ramp": _ramp,
    "rl": _rl,
    "convert": _convert,
    "run": _run,
    "probe": _measuring("probe", _PROBE),
    "estimate": _measuring("estimate", _ESTIMATE),
    "check": _measuring("check", _CHECK),
    "report": _report,
}


def _any_flags(random: Random, verb: str) -> list[str]:
    """Flags of a verb with any values, sensible or not."""
    words: list[str] = []
    for flag in random.sample(sorted(OPTIONS[verb]), min(len(OPTIONS[verb]), random.randrange(1, 7))):
        option = OPTIONS[verb][flag]
        if option.is_flag:
            words.append(flag)
        else:
            value = value_of(random, flag, option) if maybe(random, 0.7) else junk(random)
            words += [f"{flag}={value}"] if maybe(random, 0.2) else [flag, str(value)]
    return words


def _mutated(random: Random, line: Line) -> Line:
    """A line with one or two words changed, removed, repeated or added."""
    argv = line.argv[1:]
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(argv) + 1)
        kind = random.randrange(6)
        if kind == 0 and argv:
            del argv[at - 1]
        elif kind == 1 and argv:
            argv[at - 1] = junk(random)
        elif kind == 2 and argv and "=" in argv[at - 1]:
            argv[at - 1] = argv[at - 1].partition("=")[0] + "=" + junk(random)
        elif kind == 3:
            argv[at:at] = [f"{random.choice(DOTTED + KEYS)}={junk(random) if maybe(random) else number(random)}"]
        elif kind == 4 and argv:
            argv[at:at] = [random.choice(argv)]
        else:
            argv[at:at] = _any_flags(random, line.argv[0])[:2]
    return Line([line.argv[0], *argv], line.files)


def line(random: Random, verb: str) -> Line:
    """One command line of a verb: half of them as a careful user writes it, the rest with mistakes of every kind."""
    kind = random.random()
    if kind < 0.55:
        made = MAKERS[verb](random, False)
    elif kind < 0.7:
        made = MAKERS[verb](random, True)
    elif kind < 0.88:
        made = _mutated(random, MAKERS[verb](random, maybe(random, 0.3)))
    else:
        words = [f"{random.choice(KEYS + DOTTED)}={junk(random)}"] if maybe(random, 0.3) else []
        made = Line([verb, *_any_flags(random, verb), *words, *([junk(random)] if maybe(random, 0.3) else [])])
    made.argv = [word.replace("\x00", "�") for word in made.argv]  # an operating system passes no NUL
    if verb in ("run", "probe", "report"):  # no test writes to the root directory
        made.argv = [word[:-1] + "made" if word.endswith("=/") or word == "/" else word for word in made.argv]
    return made
