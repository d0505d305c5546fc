"""JAX without running: compile for the shapes and ask the compiler: argument + output + temp - alias."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from batchwright.core.errors import ConfigError, RunError
from batchwright.processes.target import no_function, task_file

from .jax_step import JaxStep
from .records import Point, Request


def load_step(target: str, args: dict[str, Any]) -> JaxStep:
    """Call the function that `FILE.py:function` names and return its JaxStep."""
    path, name = task_file(target)
    file = target.removesuffix(f":{name}")
    spec = importlib.util.spec_from_file_location(f"batchwright_jax_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == spec.name]
        raise no_function(target, file, name, own)
    _check_arguments(f"{file}:{name}", function, args)
    step = function(**args)
    if not isinstance(step, JaxStep):
        raise RunError(
            f"{file}:{name} returned {type(step).__name__}, not a batchwright.estimate.JaxStep.",
            field="task",
            given=type(step).__name__,
        )
    return step


def _check_arguments(target: str, function: Any, args: dict[str, Any]) -> None:
    import inspect

    parameters = inspect.signature(function).parameters
    unknown = [n for n in args if n not in parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"{target} takes no argument {unknown[0]!r}; it takes: {', '.join(parameters) or 'none'}.",
            field="arg",
            given=unknown[0],
            nearest=tuple(parameters),
        )


class Compiled:
    """Estimates of one JAX step at one sequence length; each `point` is a compilation."""

    def __init__(self, request: Request, sequence_length: int | None = None) -> None:
        self.sequence_length = sequence_length
        args = dict(request.args) | ({} if sequence_length is None else {"sequence_length": sequence_length})
        self.step = load_step(request.task, args)

    def point(self, micro_batch_size: int) -> Point:
        """The compiler's figures at one size; its own `peak_memory` shows arguments only on CPU, so it is not used."""
        analysis = self._compile(micro_batch_size).memory_analysis()
        if analysis is None:
            raise RunError("this JAX backend gives no memory analysis: probe instead.", field="task")
        parts = {
            "arguments": int(analysis.argument_size_in_bytes),
            "outputs": int(analysis.output_size_in_bytes),
            "temporary": int(analysis.temp_size_in_bytes),
            "aliased": -int(analysis.alias_size_in_bytes),
        }
        return Point(micro_batch_size, self.sequence_length, sum(parts.values()), parts)

    def _compile(self, micro_batch_size: int) -> Any:
        shapes = jax.tree.map(_shape, self.step.arguments(micro_batch_size))
        step: Any = self.step.step
        jitted = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=self.step.donate)
        return jitted.lower(*shapes).compile()

    def measure(self, micro_batch_size: int) -> int:
        """Peak resident bytes of two real steps on zeros, above what the process had before."""
        from .trial import memory_status

        compiled = self._compile(micro_batch_size)
        shapes = jax.tree.map(_shape, self.step.arguments(micro_batch_size))
        before = memory_status()["VmRSS"]
        for _ in range(2):
            arguments = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)
            jax.block_until_ready(compiled(*arguments))
            del arguments
        return memory_status()["VmHWM"] - before


def _shape(leaf: Any) -> Any:
    return (
        jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf))
        if not hasattr(leaf, "dtype")
        else (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    )
