"""What is known of a job, read strictly: every field has one kind, and is refused with a reason when it is not that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import gcd
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, Violation, either, raise_violations
from batchwright.core.numbers import count, fraction, nearest_multiples, positive

from .pipeline import SCHEDULES
from .world import World

# The most that a field may be: far above any job, low enough that everything below stays instant.
LARGEST_BATCH = 10**12
LARGEST_WORLD = 10**6
LARGEST_PARALLEL = 10**5


@dataclass(frozen=True)
class Request:
    """What is known of a job; None is unknown.

    `given` names what was given even where it equals a default; `origins` says where, for people to read.
    """

    global_batch_size: int | None = None
    global_batch_size_tokens: int | None = None
    sequence_length: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    max_micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    devices: int | None = None
    nodes: int | None = None
    devices_per_node: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    pipeline_schedule: str | None = None
    pipeline_style: str = "accumulation"
    pipeline_microbatches: int | None = None
    pipeline_group: int | None = None
    virtual_stages: int = 1
    delayed_forwarding: bool = False
    hosts: int | None = None
    expansion_factor: Fraction | None = None
    loading_hosts: int | None = None
    stored_hosts: int | None = None
    equal_rows: bool = False
    samples_per_second: float | None = None
    step_seconds: float | None = None
    round: str | None = None
    allow_ragged: bool = False
    given: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def choice(*names: str) -> Callable[[Any, str], str]:
    """A reader for one of a few names."""

    def read(value: Any, name: str) -> str:
        if value not in names:
            raise ConfigError(
                f"{name}={str(value)[:40]!r} is not one of {', '.join(names)}.", field=name, given=value, nearest=names
            )
        return value

    return read


def switch(value: Any, name: str) -> bool:
    """A reader for true or false."""
    words = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{name}={str(value)[:40]!r} is not true or false.", field=name, given=value)
    return words[str(value).lower()]


def _factor(value: Any, name: str) -> Fraction:
    number = fraction(value, name)
    if number > LARGEST_WORLD or 0 < number < Fraction(1, LARGEST_WORLD):
        raise ConfigError(
            f"{name}={str(value)[:40]} is not between 1/{LARGEST_WORLD} and {LARGEST_WORLD}.",
            field=name,
            given=str(value)[:40],
            nearest=(1,),
        )
    return number


_batch = partial(count, most=LARGEST_BATCH)
_world_size = partial(count, most=LARGEST_WORLD)
_parallel = partial(count, most=LARGEST_PARALLEL)

# How each field is read: the one place that knows what a value may be.
READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "global_batch_size": _batch,
    "global_batch_size_tokens": count,
    "sequence_length": partial(count, most=10**9),
    "micro_batch_size": _batch,
    "accumulation_steps": _batch,
    "max_micro_batch_size": _batch,
    "data_parallel_size": _world_size,
    "devices": _world_size,
    "nodes": _world_size,
    "devices_per_node": _parallel,
    "tensor_parallel": _parallel,
    "pipeline_parallel": _parallel,
    "context_parallel": _parallel,
    "expert_parallel": _parallel,
    "expert_tensor_parallel": _parallel,
    "pipeline_schedule": choice(*SCHEDULES),
    "pipeline_style": choice("accumulation", "inner"),
    "pipeline_microbatches": _batch,
    "pipeline_group": _parallel,
    "virtual_stages": _parallel,
    "delayed_forwarding": switch,
    "hosts": _world_size,
    "expansion_factor": _factor,
    "loading_hosts": _world_size,
    "stored_hosts": _world_size,
    "equal_rows": switch,
    "samples_per_second": positive,
    "step_seconds": positive,
    "round": choice("down", "up"),
    "allow_ragged": switch,
}


def read_request(
    values: Mapping[str, Any], *, origins: Mapping[str, str] | None = None, notes: Iterable[str] = ()
) -> Request:
    """A Request from raw values (ints or text such as `4M`); all that is wrong with them is said at once.

    >>> read_request({"global_batch_size": "1Ki", "nodes": 2}).global_batch_size
    1024
    """
    wrong: list[Violation] = []
    read: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name not in READERS:
            wrong.append(unknown_key(name, value, READERS))
            continue
        try:
            read[name] = READERS[name](value, name)
        except ConfigError as error:
            wrong.extend(error.violations)
    raise_violations(ConfigError, wrong)
    return Request(**read, given=frozenset(read), origins=dict(origins or {}), notes=tuple(notes))


def within_probe(
    request: Request, record: Mapping[str, Any], where: str = "", *, longest: int | None = None, synced: bool = False
) -> Request:
    """The request within what a probe measured: the most that fits is the most there is, unless another most is given.

    `longest` is the longest sequence of the run: at another length than was probed, the most is that of as many tokens.
    `synced`: the time of synchronisation is known from elsewhere.

    >>> within_probe(Request(), {"max_micro_batch_size": 37, "ranks": 2}, "p.json").max_micro_batch_size
    37
    """
    from batchwright.core.nodes.throughput import probed_length

    notes, origins, most = list(request.notes), request.origins, request.max_micro_batch_size
    probed, length = probed_length(record), longest or request.sequence_length
    if most is None and record.get("max_micro_batch_size") is not None:
        most = measured = count(record["max_micro_batch_size"], "max_micro_batch_size")
        origins = {**origins, "max_micro_batch_size": f"probe {where}".strip()}
        if probed and length and probed != length:
            most = max(1, measured * probed // length)
            notes.append(
                f"max_micro_batch_size is {measured} at sequence_length {probed} by the probe: by tokens {most} at {length}, "
                "which was not measured."
            )
    if record.get("bottleneck") == "too-noisy":
        notes.append("The probe's times are too noisy for a verdict, so what follows from them is, too: probe again.")
    ranks = record.get("ranks")
    if isinstance(ranks, int) and not synced:
        notes.append(
            f"Times are those of a probe on {ranks} rank{'s' * (ranks > 1)}: what more of them cost in synchronisation is "
            "not in them."
        )
    return replace(request, max_micro_batch_size=most, origins=origins, notes=tuple(notes))


def unused_pipeline(request: Request) -> list[Violation]:
    """What is said of a pipeline where there is none: a mistake of somebody, so it is not passed over."""
    if request.pipeline_parallel > 1:
        return []
    said = {
        "pipeline_schedule": request.pipeline_schedule,
        "pipeline_microbatches": request.pipeline_microbatches,
        "pipeline_group": request.pipeline_group,
        "virtual_stages": request.virtual_stages if request.virtual_stages > 1 else None,
        "delayed_forwarding": request.delayed_forwarding or None,
    }
    return [
        Violation(f"{name}={value} needs a pipeline: pipeline_parallel is 1.", name, value)
        for name, value in said.items()
        if value is not None
    ]


def unknown_key(name: str, value: Any, known: Iterable[str], where: str = "") -> Violation:
    """A violation for a key nobody knows, with the closest ones there are."""
    from difflib import get_close_matches  # only wrong input pays for it

    close = get_close_matches(name, list(known), n=2, cutoff=0.6)
    hint = f" Did you mean {either(close)}?" if close else ""
    return Violation(f"{name[:60]} is not a known key{where}.{hint}", name[:60], value, tuple(close))


def devices_of(request: Request) -> tuple[int | None, list[Violation]]:
    """All devices, from whatever says how many, or None; and what is wrong where two things say it differently."""
    devices, nodes, per_node = request.devices, request.nodes, request.devices_per_node
    if not nodes or not per_node:
        return devices, []
    product = nodes * per_node
    if devices in (None, product):
        return product, []
    message = (
        f"devices={devices} contradicts nodes {nodes} × devices_per_node {per_node} = {product}. "
        f"Nearest: devices={product}."
    )
    return product, [Violation(message, "devices", devices, (product,))]


def resolve_ranks(request: Request) -> int | None:
    """The data-parallel size from whichever of devices, nodes and ranks are known, or None.

    >>> resolve_ranks(Request(nodes=16, devices_per_node=8, tensor_parallel=2))
    64
    """
    replica = request.tensor_parallel * request.pipeline_parallel * request.context_parallel
    split = world_of(request, 1).split() or "1"
    devices, wrong = devices_of(request)
    if request.nodes and request.devices_per_node and devices is not None and devices % replica:
        per_node = request.devices_per_node
        near = nearest_multiples(replica // gcd(replica, per_node), request.nodes)
        wrong.append(
            Violation(
                f"nodes={request.nodes} × devices_per_node {per_node} = {devices} devices are not a whole number of "
                f"replicas: {split} = {replica} devices each, and {devices} / {replica} = {devices / replica:.2f}. "
                f"Nearest: {either(near)} nodes.",
                "nodes",
                request.nodes,
                near,
            )
        )
        raise_violations(PlanError, wrong)
    if devices is not None and devices % replica:
        near = nearest_multiples(replica, devices)
        wrong.append(
            Violation(
                f"devices={devices} is not a whole number of replicas: {split} = {replica} devices each, and {devices} / "
                f"{replica} = {devices / replica:.2f}. Nearest: {either(near)} devices.",
                "devices",
                devices,
                near,
            )
        )
        raise_violations(PlanError, wrong)
    if devices is None:
        return request.data_parallel_size
    ranks = devices // replica
    if request.data_parallel_size is not None and request.data_parallel_size != ranks:
        wrong.append(
            Violation(
                f"data_parallel_size={request.data_parallel_size} contradicts {devices} devices / ({split}) = {ranks}. "
                f"Nearest: data_parallel_size={ranks}, or {request.data_parallel_size * replica} devices.",
                "data_parallel_size",
                request.data_parallel_size,
                (ranks,),
            )
        )
    raise_violations(PlanError, wrong)
    return ranks


def asked_for(request: Request, samples: int) -> bool:
    """Whether so many samples are the global batch that was asked for, be it in samples or in tokens."""
    if request.global_batch_size_tokens is None:
        return samples == request.global_batch_size
    return samples * (request.sequence_length or 0) == request.global_batch_size_tokens


def world_of(request: Request, ranks: int) -> World:
    """The world of a request once its data-parallel size is known."""
    per_node = request.devices_per_node
    if per_node is None and request.nodes and request.devices and request.devices % request.nodes == 0:
        per_node = request.devices // request.nodes
    return World(
        ranks,
        per_node,
        request.tensor_parallel,
        request.pipeline_parallel,
        request.context_parallel,
        request.expert_parallel,
        request.expert_tensor_parallel,
    )


def batch_in_samples(request: Request) -> int | None:
    """The global batch in samples, from samples or tokens, or None."""
    tokens, length = request.global_batch_size_tokens, request.sequence_length
    if tokens is None:
        return request.global_batch_size
    if length is None:
        raise PlanError(
            f"global_batch_size_tokens={tokens:,} needs sequence_length to become samples.",
            field="sequence_length",
            nearest=[n for n in (2048, 4096, 8192) if tokens % n == 0],
        )
    rounds = request.round == "up" or (request.round == "down" and tokens > length)
    if tokens % length and rounds and request.global_batch_size is None:
        return _batch(tokens // length + (request.round == "up"), "global_batch_size")
    if tokens % length:
        below, above = tokens // length, tokens // length + 1
        hint = ""
        binary = {10**6: 2**20, 10**3: 2**10, 10**9: 2**30}
        for decimal, power in binary.items():
            meant = tokens // decimal * power
            if tokens % decimal == 0 and tokens // decimal < 1000 and meant % length == 0:
                suffix = {2**10: "Ki", 2**20: "Mi", 2**30: "Gi"}[power]
                hint = f" Did you mean {tokens // decimal}{suffix} = {meant:,} ({meant // length})?"
        raise PlanError(
            f"global_batch_size_tokens={tokens:,} is {tokens / length:.2f} samples at sequence_length={length}. Nearest: "
            + " or ".join(f"{n * length:,} tokens ({n})" for n in (below, above) if n)
            + f".{hint}",
            field="global_batch_size_tokens",
            given=tokens,
            nearest=[n * length for n in (below, above) if n],
        )
    if request.global_batch_size is not None and request.global_batch_size * length != tokens:
        raise PlanError(
            f"global_batch_size_tokens={tokens:,} contradicts global_batch_size {request.global_batch_size} × "
            f"sequence_length {length} = {request.global_batch_size * length:,}. Nearest: global_batch_size="
            f"{tokens // length}.",
            field="global_batch_size_tokens",
            given=tokens,
            nearest=(request.global_batch_size * length,),
        )
    return _batch(tokens // length, "global_batch_size")
