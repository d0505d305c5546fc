"""The verbs as Python functions: what the command line does, with values instead of flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import dialects
from .core import codec
from .core.nearby import Nearby
from .core.nearby import nearby as _nearby
from .core.plan import Plan as _Plan
from .core.plan import plan as _plan
from .core.request import Request, read_request
from .core.units import percentage


class Plan(_Plan):
    """A plan that can also fill itself into another framework's recipe."""

    def apply(self, recipe: object) -> dict[str, Any]:
        """Fill the plan into an object with NeMo's attributes; returns what was set, by dotted name."""
        from .dialects import nemo

        return nemo.write_recipe(self, recipe)


def request(source: object = None, /, **given: Any) -> Request:
    """What is known of a job: from a mapping of keys in any spelling or a NeMo recipe, and from keywords, which win."""
    entries: list[tuple[str, dialects.Given]] = []
    lenient = False
    if source is not None:
        if isinstance(source, Mapping):
            keys = dialects.flatten(source)
        else:
            from .dialects import nemo

            keys, lenient = nemo.read_recipe(source), True
        entries += [(key, dialects.Given(value, key, 0)) for key, value in keys.items()]
    entries += [(key, dialects.Given(value, "", 1)) for key, value in given.items() if value is not None]
    resolved = dialects.resolve(entries, lenient=lenient)
    values = {name: g.value for name, g in resolved.fields.items()}
    origins = {name: g.origin for name, g in resolved.fields.items() if g.origin}
    return read_request(values, origins=origins, notes=resolved.notes)


def plan(source: object = None, /, **given: Any) -> Plan:
    """Plan a batch: give what is known, get the rest. Names are those of `batchwright plan`'s flags.

    >>> p = plan(global_batch_size=1024, nodes=16, devices_per_node=8, tensor_parallel=2, max_micro_batch_size=6)
    >>> p.micro_batch_size, p.accumulation_steps, p.data_parallel_size
    (4, 4, 64)
    """
    made = _plan(request(source, **given))
    return Plan(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def nearby(source: object = None, /, *, tolerance: str | float, **given: Any) -> tuple[Nearby, ...]:
    """Batches and rank counts near a request that work, closest first.

    >>> nearby(global_batch_size=1000, micro_batch_size=3, data_parallel_size=64, tolerance="5%")[0].global_batch_size
    960
    """
    return _nearby(request(source, **given), percentage(tolerance))


__all__ = ["Nearby", "Plan", "codec", "nearby", "plan", "request"]
