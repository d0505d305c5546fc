"""JAX without running: a file returns its step and the arguments for a batch size, the compiler reports their memory.

The sum of arguments, outputs and temporaries, minus what is aliased. Only `CompiledRuns` needs JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchwright.core.errors import RunError
from batchwright.processes.memory import status_bytes
from batchwright.processes.target import call_target, imports_name

from .records import EstimateRequest, Point


@dataclass(frozen=True)
class JaxStep:
    """One training step of JAX: `step(*arguments(micro_batch_size))`, compiled but not run.

    `arguments` gives arrays or `jax.ShapeDtypeStruct`s, parameters and optimizer state included; `donate` are the
    positions whose memory the outputs may reuse (`donate_argnums`). A step that is already jitted is used unchanged.

    >>> JaxStep(step=lambda x: x, arguments=lambda micro_batch_size: ((micro_batch_size, 4),)).donate
    ()
    """

    step: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    donate: tuple[int, ...] = ()


def is_jax(source: str) -> bool:
    """Whether a file returns a JaxStep or a JaxTask: it imports the name.

    >>> is_jax("from batchwright.estimate import JaxStep"), is_jax("import torch")
    (True, False)
    """
    return imports_name(source, "JaxStep") or imports_name(source, "JaxTask")


def load_step(target: str, args: dict[str, Any]) -> JaxStep:
    """Call the function that `FILE.py:function` names and return its JaxStep, or the step of its JaxTask."""
    return call_target(target, args, JaxStep, "batchwright.estimate.JaxStep or a batchwright.jax.JaxTask", _as_step)


def _as_step(made: object) -> object:
    """A JaxTask as the step of its loop, with one micro batch; anything else as it is."""
    if type(made).__name__ != "JaxTask":
        return made
    from batchwright.jax.task import JaxTask

    return JaxStep(*made.estimated_step(), donate=(0, 1)) if isinstance(made, JaxTask) else made


class CompiledRuns:
    """Estimates of one JAX step at one sequence length; each `point` is a compilation."""

    def __init__(self, request: EstimateRequest, sequence_length: int | None = None) -> None:
        import jax

        self.jax: Any = jax
        self.sequence_length = sequence_length
        self.step = load_step(request.task, request.arguments(sequence_length))

    def point(self, micro_batch_size: int) -> Point:
        """The compiler's numbers at one size; on CPU its own `peak_memory` contains arguments only, so it is not used."""
        analysis = self._compile(self._shapes(micro_batch_size)).memory_analysis()
        if analysis is None:
            raise RunError("this JAX backend has no memory analysis: probe instead.", field="task")
        parts = {
            "arguments": int(analysis.argument_size_in_bytes),
            "outputs": int(analysis.output_size_in_bytes),
            "temporary": int(analysis.temp_size_in_bytes),
            "aliased": -int(analysis.alias_size_in_bytes),
        }
        return Point(micro_batch_size, self.sequence_length, sum(parts.values()), parts)

    def measure(self, micro_batch_size: int) -> int:
        """Run two steps on zeros: peak resident bytes above those of the process before."""
        shapes = self._shapes(micro_batch_size)
        compiled = self._compile(shapes)
        before = status_bytes("VmRSS")
        for _ in range(2):
            arguments = self.jax.tree.map(lambda s: self.jax.numpy.zeros(s.shape, s.dtype), shapes)
            self.jax.block_until_ready(compiled(*arguments))
            del arguments
        return status_bytes("VmHWM") - before

    def _shapes(self, micro_batch_size: int) -> Any:
        numpy, struct = self.jax.numpy, self.jax.ShapeDtypeStruct

        def shape(leaf: Any) -> Any:
            if hasattr(leaf, "dtype"):
                return struct(leaf.shape, leaf.dtype)
            return struct(numpy.shape(leaf), numpy.result_type(leaf))

        return self.jax.tree.map(shape, self.step.arguments(micro_batch_size))

    def _compile(self, shapes: Any) -> Any:
        step: Any = self.step.step
        jitted = step if hasattr(step, "lower") else self.jax.jit(step, donate_argnums=self.step.donate)
        return jitted.lower(*shapes).compile()
