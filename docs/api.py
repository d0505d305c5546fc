"""Writes docs/api.md: every public name of `batchwright`, its rooms `runtime` and `jax`, and its adapters, grouped by idea.

    python docs/api.py

`page()` returns the text; a test compares it with the file. Every public name must be in one group. The adapters are read
and not imported: each would import its framework.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import batchwright
import batchwright.jax
import batchwright.runtime

PAGE = Path(__file__).with_name("api.md")
HEAD = """# API

All public names, with their signatures. `python docs/api.py` writes this page. Each name is imported on first use, so
`import batchwright` is cheap. `batchwright.runtime`, `probe`, `check` and `train` need torch, `estimate` torch or JAX.
[Bring your own loop](own_loop.md) shows the names of `batchwright.runtime` in use, [JAX](jax.md) those of `batchwright.jax`.
Each adapter needs its framework:
[Hugging Face](huggingface.md), [Lightning](lightning.md).
"""
GROUPS = {
    batchwright: {
        "Verbs": "plan nearby ramp rl convert check_config probe estimate check run report train",
        "Results": "Plan Nearby Ramp RLPlan",
        "Rules of a ramp": "Constant Linear PerDevice Thresholds Doubling Rule",
        "Schedules": "Schedule Segment SampleSchedule",
        "Errors": "BatchwrightError PlanError ScheduleError ConfigError RunError NothingFitsError EnvironmentFault "
        "MissingExtraError",
    },
    batchwright.runtime: {
        "Task and device": "Task load_task to_device",
        "Order, sampler, loader": "GlobalOrder StepSampler Slice Loader ReadingHosts Micro windows",
        "Sources": "TokenFile JsonLines Parquet TarShards Shards indexed Access Reads",
        "Step": "accumulate Accumulator PipelineAccumulator GradientStep StepResult NoiseScale NoiseEstimate",
        "Checkpoint and ledger": "Checkpoints Ledger next_launch audit LedgerAudit",
        "Loop": "train Settings read_events",
        "Reinforcement learning": "train_rl RLTask RLSettings Prompts RoundResult",
        "Ranks": "Ranks discover data_parallel",
    },
    batchwright.jax: {
        "Gradient": "accumulate Accumulated micro_steps MicroSteps",
        "Rows": "Feed StepBatch maxtext",
        "Checkpoint": "Checkpoints save restore",
        "Task and loop": "JaxTask load_task check train",
    },
}
ADAPTERS = {"huggingface": "exact", "lightning": "exact Steps"}
SOURCE = Path(batchwright.__file__).parent / "adapters"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module, groups in GROUPS.items():
        listed = [name for names in groups.values() for name in names.split()]
        public = [name for name in dir(module) if not name.startswith("_")]
        if sorted(listed) != sorted(public):
            raise SystemExit(f"{module.__name__}: not in exactly one group: {sorted(set(listed) ^ set(public))}")
        parts.append(f"## {module.__name__}\n")
        for title, names in groups.items():
            parts.append(f"### {title}\n")
            parts += [entry(module, name) for name in names.split()]
    for name, names in ADAPTERS.items():
        parts.append(f"## batchwright.adapters.{name}\n")
        body = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8")).body
        found = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        parts += [declared(found[one]) for one in names.split()]
    return "\n".join(parts)


def entry(module: ModuleType, name: str) -> str:
    """One name: its signature, the first line of its docstring, and its methods."""
    # Not getattr: once the package `batchwright.probe` is imported, it hides the function.
    value = module.__getattr__(name)
    lines = ["```text", signature(name, value), "```", "", (inspect.getdoc(value) or "").split("\n")[0]]
    kinds = FunctionType, classmethod, staticmethod
    inherits = isinstance(value, type) and not issubclass(value, Exception)
    ours = [one for one in value.__mro__ if one.__module__.startswith("batchwright.")] if inherits else [value]
    found = dict.fromkeys(n for one in ours for n, m in vars(one).items() if isinstance(m, kinds))
    methods = [f"`{n}`" for n in found if not n.startswith("_")]
    if isinstance(value, type) and methods:
        lines += ["", f"Methods: {', '.join(methods)}."]
    return "\n".join([*lines, ""])


def signature(name: str, value: Any) -> str:
    """A call on one line if it fits, else one parameter per line; errors and abstract classes with their bases."""
    error = isinstance(value, type) and issubclass(value, Exception) and "__init__" not in vars(value)
    if error or inspect.isabstract(value):
        return f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    found = inspect.signature(value)
    parameters: list[str] = []
    kinds = [p.kind for p in found.parameters.values()]
    for index, p in enumerate(found.parameters.values()):
        if p.kind is p.KEYWORD_ONLY and not {p.KEYWORD_ONLY, p.VAR_POSITIONAL} & set(kinds[:index]):
            parameters.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else " = ..." if inspect.isroutine(p.default) else f" = {p.default!r}"
        parameters.append(f"{stars}{p.name}: {annotation(p.annotation)}{default}")
        if p.kind is p.POSITIONAL_ONLY and p.POSITIONAL_ONLY not in kinds[index + 1 :]:
            parameters.append("/")
    end = "" if isinstance(value, type) else f" -> {annotation(found.return_annotation)}"
    return call(name, parameters, end)


def call(name: str, parameters: list[str], end: str) -> str:
    line = f"{name}({', '.join(parameters)}){end}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){end}"


def declared(node: ast.FunctionDef | ast.ClassDef) -> str:
    """A function or a class that was read: its signature and its docstring."""
    made = [one for one in getattr(node, "body", []) if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    function = made[0] if isinstance(node, ast.ClassDef) else node
    given, first = function.args, int(function is not node)  # without self
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    pairs = [*zip(given.args, defaults, strict=True)][first:], [*zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    known, named = (
        [ast.unparse(one) + (f" = {ast.unparse(default)}" if default else "") for one, default in some]
        for some in pairs
    )
    rest = [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
    end = f" -> {ast.unparse(function.returns)}" if function is node and function.returns else ""
    text = call(node.name, [*known, *(["*"] if named else []), *named, *rest], end)
    return "\n".join(["```text", text, "```", "", ast.get_docstring(node) or "", ""])


def annotation(given: Any) -> str:
    return given if isinstance(given, str) else inspect.formatannotation(given)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
