"""The verbs as Python functions: the command line with values instead of flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from . import dialects
from .core.batch.nearby import Nearby
from .core.batch.nearby import nearby as _nearby
from .core.batch.plan import BatchPlan
from .core.batch.plan import plan as _plan
from .core.batch.request import READERS, BatchRequest, read_request
from .core.errors import ConfigError
from .core.numbers import percentage

if TYPE_CHECKING:
    from .core.ramp.ramp import Ramp
    from .launch.status import RunStatus


class Plan(BatchPlan):
    """A plan with `apply`, which writes it into a NeMo recipe."""

    def apply(self, recipe: object) -> dict[str, Any]:
        """Set the plan's numbers on an object with NeMo's attributes; returns what was set, by dotted name."""
        from .dialects import nemo

        return nemo.write_recipe(self, recipe)


def _resolve(source: object, given: Mapping[str, Any], own: Collection[str]) -> dialects.Resolved:
    """Fields from a mapping with keys in any spelling or a NeMo recipe, and from keywords, which take precedence."""
    entries: list[tuple[str, dialects.Given]] = []
    lenient = False
    if source is not None:
        if isinstance(source, Mapping):
            keys = dialects.flatten(cast("Mapping[Any, Any]", source))
        else:
            from .dialects import nemo

            keys, lenient = nemo.read_recipe(source), True
        entries += [(key, dialects.Given(value, key, 0)) for key, value in keys.items()]
    entries += [(key, dialects.Given(value, "", 1)) for key, value in given.items() if value is not None]
    return dialects.resolve(entries, own=own, lenient=lenient)


def _request(resolved: dialects.Resolved) -> BatchRequest:
    fields = {name: given for name, given in resolved.fields.items() if name in READERS}
    return read_request(
        {name: given.value for name, given in fields.items()},
        origins={name: given.origin for name, given in fields.items() if given.origin},
        notes=resolved.notes,
    )


def plan(source: object = None, /, **given: Any) -> Plan:
    """Plan a batch: give the known numbers, get all. The names are those of `batchwright plan`'s flags.

    >>> p = plan(global_batch_size=1024, nodes=16, devices_per_node=8, tensor_parallel=2, max_micro_batch_size=6)
    >>> p.micro_batch_size, p.accumulation_steps, p.data_parallel_size
    (4, 4, 64)
    """
    made = _plan(_request(_resolve(source, given, READERS)))
    return Plan(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def nearby(source: object = None, /, *, tolerance: str | float, **given: Any) -> tuple[Nearby, ...]:
    """Valid batches and rank counts close to a request, closest first.

    >>> nearby(global_batch_size=1000, micro_batch_size=3, data_parallel_size=64, tolerance="5%")[0].global_batch_size
    960
    """
    return _nearby(_request(_resolve(source, given, READERS)), percentage(tolerance))


def ramp(source: object = None, /, **given: Any) -> Ramp:
    """A batch that grows: every stage with its nodes, cost and learning rate. Names as in `batchwright ramp`'s flags.

    >>> r = ramp(linear=(256, 128, "50M"), global_batch_size=1024)
    >>> r.at_sample(30_000_000).global_batch_size
    640
    """
    from .core.ramp.ramp import ramp as make
    from .core.ramp.request import RAMP_READERS, read_ramp

    resolved = _resolve(source, given, [*READERS, *RAMP_READERS])
    wanted = read_ramp({name: g.value for name, g in resolved.fields.items() if name in RAMP_READERS})
    return make(_request(resolved), wanted)


def run(
    target: str | Sequence[str] | None = None,
    /,
    *,
    arguments: Mapping[str, Any] | None = None,
    dir: str | None = None,
    resume: str | None = None,
    progress: bool = True,
    **given: Any,
) -> RunStatus:
    """Train a whole ramp, launch by launch, and restart after failures. Names are those of `batchwright run`'s flags.

    `target` is `FILE.py:function`, with `arguments` for the function, or a command as a list. With `resume`, a run
    directory, the rest changes its launch settings and, from its position on, its batch, world and ramp. Returns the state
    at the end, also of a run that failed or was stopped.
    """
    from .core.ramp.request import RAMP_READERS, read_ramp
    from .launch import plan as planning
    from .launch.directory import RunDirectory
    from .launch.resume import resume as resumed
    from .launch.settings import READERS as OPTIONS
    from .launch.settings import read_options
    from .launch.show import LineDisplay, display
    from .launch.status import status
    from .launch.supervisor import supervise

    options = {name: given.pop(name) for name in list(given) if name in OPTIONS}
    resolved = _resolve(None, given, [*READERS, *RAMP_READERS])
    request = _request(resolved)
    ramp_values = {name: g.value for name, g in resolved.fields.items() if name in RAMP_READERS}
    if resume is not None:
        directory = RunDirectory(resume)
        fixed = {"target": target, "arguments": arguments, "dir": dir, "seed": options.get("seed")}
        if named := [name for name, value in fixed.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(named)} cannot be changed with resume. The batch, the world, the ramp and launch settings can.",
                field="resume",
                given=resume,
            )
        made = resumed(directory, options, request, ramp_values)
    else:
        command = () if target is None or isinstance(target, str) else tuple(target)
        made, _ = planning.build(
            request,
            read_ramp(ramp_values),
            read_options(options, command=bool(command)),
            target=None if command or target is None else str(target),
            arguments=arguments,
            command=command,
        )
        directory = RunDirectory(dir) if dir else planning.default_directory(made)
        planning.begin(directory, made)
    shown = display() if progress else LineDisplay(StringIO())
    try:
        supervise(directory, made, shown)
    finally:
        shown.close()
        directory.unlock()
    return status(directory, made)
