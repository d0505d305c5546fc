"""What is known about a job, read strictly: each field has one reader, which accepts a value or says why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import gcd
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, Violation, either, raise_violations
from batchwright.core.fields import Readers, choice, read_fields, switch
from batchwright.core.numbers import count, fraction, nearest_multiples, positive

from .pipeline import HALF_SPEED_TOKENS, SCHEDULES
from .world import World

# Limits of fields: far above any job, and low enough that planning stays fast.
LARGEST_BATCH = 10**12
LARGEST_WORLD = 10**6
LARGEST_PARALLEL = 10**5


@dataclass(frozen=True)
class BatchRequest:
    """What is known about a job; None means unknown.

    `given` names the given fields, even those that equal a default; `origins` says where each came from, as text.
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
    half_speed_tokens: int | None = None  # fitted by a probe; no flag
    virtual_stages: int = 1
    delayed_forwarding: bool = False
    hosts: int | None = None
    expansion_factor: Fraction | None = None
    loading_hosts: int | None = None
    stored_hosts: int | None = None
    equal_rows: bool = False
    read_ahead: int = 1
    samples_per_second: float | None = None
    step_seconds: float | None = None
    round: str | None = None
    allow_ragged: bool = False
    given: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


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

# How each field is read: the only place that defines which values are valid.
READERS: Readers = {
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
    "read_ahead": partial(count, most=10_000),
    "samples_per_second": positive,
    "step_seconds": positive,
    "round": choice("down", "up"),
    "allow_ragged": switch,
}


def read_request(
    values: Mapping[str, Any], *, origins: Mapping[str, str] | None = None, notes: Iterable[str] = ()
) -> BatchRequest:
    """A BatchRequest from raw values (ints or text such as `4M`); one error lists everything that is wrong.

    >>> read_request({"global_batch_size": "1Ki", "nodes": 2}).global_batch_size
    1024
    """
    read = read_fields(values, READERS)
    return BatchRequest(**read, given=frozenset(read), origins=dict(origins or {}), notes=tuple(notes))


def within_probe(
    request: BatchRequest,
    record: Mapping[str, Any],
    where: str = "",
    *,
    longest: int | None = None,
    synced: bool = False,
) -> BatchRequest:
    """The request with a probe's max_micro_batch_size, unless the request gives its own.

    `longest` is the longest sequence of the run: if it differs from the probed length, the maximum is scaled by tokens.
    `synced`: the time of synchronisation is given separately.

    >>> within_probe(BatchRequest(), {"max_micro_batch_size": 37, "ranks": 2}, "p.json").max_micro_batch_size
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
                f"The probe found max_micro_batch_size {measured} at sequence_length {probed}. Scaled by tokens: {most} at "
                f"{length}, which was not measured."
            )
    fitted = record.get("half_speed_tokens")
    if isinstance(fitted, int):
        request = replace(request, half_speed_tokens=fitted)
        notes.append(
            f"The probe found that a microbatch of {fitted} tokens runs at half speed; the assumption is "
            f"{HALF_SPEED_TOKENS}."
        )
    if record.get("bottleneck") == "too-noisy":
        notes.append("The probe's times are too noisy to rely on, and so is everything derived from them: probe again.")
    ranks = record.get("ranks")
    if isinstance(ranks, int) and not synced:
        notes.append(
            f"The times are from a probe on {ranks} rank{'s' * (ranks > 1)}: they do not include the synchronisation of "
            "more ranks."
        )
    return replace(request, max_micro_batch_size=most, origins=origins, notes=tuple(notes))


def unused_pipeline(request: BatchRequest) -> list[Violation]:
    """A violation for each pipeline option that is given without a pipeline: it would have no effect."""
    if request.pipeline_parallel > 1:
        return []
    given = {
        "pipeline_schedule": request.pipeline_schedule,
        "pipeline_microbatches": request.pipeline_microbatches,
        "pipeline_group": request.pipeline_group,
        "virtual_stages": request.virtual_stages if request.virtual_stages > 1 else None,
        "delayed_forwarding": request.delayed_forwarding or None,
    }
    return [
        Violation(f"{name}={value} needs a pipeline: pipeline_parallel is 1.", name, value)
        for name, value in given.items()
        if value is not None
    ]


def devices_of(request: BatchRequest) -> tuple[int | None, list[Violation]]:
    """The number of devices, or None; and a violation if `devices` contradicts nodes × devices_per_node."""
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


def resolve_ranks(request: BatchRequest) -> int | None:
    """The data-parallel size from devices, nodes or ranks, whichever are known; or None.

    >>> resolve_ranks(BatchRequest(nodes=16, devices_per_node=8, tensor_parallel=2))
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
                f"nodes={request.nodes} × devices_per_node {per_node} = {devices} devices do not hold a whole number of "
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
                f"devices={devices} does not hold a whole number of replicas: {split} = {replica} devices each, and {devices} / "
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


def asked_for(request: BatchRequest, samples: int) -> bool:
    """Whether `samples` is the requested global batch, given in samples or in tokens."""
    if request.global_batch_size_tokens is None:
        return samples == request.global_batch_size
    return samples * (request.sequence_length or 0) == request.global_batch_size_tokens


def world_of(request: BatchRequest, ranks: int) -> World:
    """The world of a request with this data-parallel size."""
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


def batch_in_samples(request: BatchRequest) -> int | None:
    """The global batch in samples, from samples or tokens; None if neither is given."""
    tokens, length = request.global_batch_size_tokens, request.sequence_length
    if tokens is None:
        return request.global_batch_size
    if length is None:
        raise PlanError(
            f"global_batch_size_tokens={tokens:,} needs sequence_length to convert tokens to samples.",
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
