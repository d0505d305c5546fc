"""MaxText: `per_device_batch_size` counts *all* devices, may be below 1, and the mesh is `ici_…` × `dcn_…`.

    global batch = devices × per_device_batch_size × gradient_accumulation_steps
    micro_batch_size here = per_device_batch_size × devices per replica (tensor × pipeline × context)

MaxText truncates sizes that are not whole (`int(devices × per_device)`); batchwright refuses them.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, fraction, nearest_multiples, positive

from . import Dialect, Fields, Given

# Axes of the mesh, by their effect on a batch.
_AXES = {
    "data": "data_parallel_size",
    "fsdp": "data_parallel_size",
    "fsdp_transpose": "data_parallel_size",
    "expert": "data_parallel_size",
    "tensor": "tensor_parallel",
    "tensor_transpose": "tensor_parallel",
    "tensor_sequence": "tensor_parallel",
    "sequence": "tensor_parallel",
    "autoregressive": "tensor_parallel",
    "context": "context_parallel",
    "context_autoregressive": "context_parallel",
    "pipeline": "pipeline_parallel",
}
_MESH = {f"{scope}_{axis}_parallelism": axis for scope in ("ici", "dcn") for axis in _AXES}

_RAMP = {
    "enable_rampup_batch_size": "False",
    "per_device_batch_size_start": "4.0",
    "per_device_batch_size_increment": "2.0",
    "global_rampup_samples": "500",
}  # with MaxText's defaults

# num_pipeline_repeats defaults to layers / (stages × layers per stage)
_LAYERS = ("pipeline_parallel_layers", "base_num_decoder_layers", "num_layers_per_pipeline_stage", "model_name")

_SPECIAL = {
    "per_device_batch_size",
    "expansion_factor_real_data",
    "num_pipeline_microbatches",
    "num_pipeline_repeats",
    *_LAYERS,
    *_RAMP,
    *_MESH,
}


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    notes: list[str] = []
    found = _mesh(special, fields, notes)

    def known(name: str, default: int) -> int:
        given = found.get(name) or fields.get(name)
        return default if given is None else count(given.value, name)

    ramp = _ramp(special)
    replica = known("tensor_parallel", 1) * known("pipeline_parallel", 1) * known("context_parallel", 1)
    if "per_device_batch_size" in special:
        given = special["per_device_batch_size"]
        positive(given.value, "per_device_batch_size")  # checks the range
        size = fraction(given.value, "per_device_batch_size")
        micro = size * replica
        devices = _devices(fields)
        ranks = found.get("data_parallel_size") or fields.get("data_parallel_size")
        all_devices = devices or (count(ranks.value, "data_parallel_size") * replica if ranks else None)
        cut = all_devices is not None and (size * all_devices).denominator != 1
        if micro > 0 and micro.denominator == 1:
            origin = f"{given.origin} × {replica} devices per replica" if replica > 1 else given.origin
            # A ramp ends at this size and its stages are smaller, so it is the maximum.
            name = "max_micro_batch_size" if ramp else "micro_batch_size"
            found[name] = Given(int(micro), origin, given.level)
        elif micro > 0 and devices and (size * devices).denominator == 1:
            # A whole batch, but not of whole micro batches: the equation reports that, with the nearest values.
            whole = int(size * devices) * known("accumulation_steps", 1)
            found["global_batch_size"] = Given(whole, f"{given.origin} × {devices} devices", given.level)
        else:
            near = [n for n in (micro.__floor__(), micro.__ceil__()) if n > 0] or [1]
            raise PlanError(
                f"per_device_batch_size={given.value} is not a whole micro batch: it counts all devices, so × {replica} "
                f"device{'s' * (replica > 1)} per replica = {float(micro):g} samples. Nearest: "
                f"{either([_decimal(Fraction(n, replica)) for n in near])} (micro batch {either(near)}); a size "
                f"below 1 needs tensor, pipeline or context parallelism.{' MaxText would truncate the batch.' * cut}",
                field="per_device_batch_size",
                given=str(given.value),
                nearest=[_decimal(Fraction(n, replica)) for n in near],
            )
        if replica > 1:
            notes.append(
                f"MaxText's per_device_batch_size counts every device: {size} × {replica} devices per replica = "
                f"micro_batch_size {micro}."
            )
        if size < 1:
            notes.append(
                f"If per_device_batch_size is below 1, MaxText reads one row per device and drops {float(1 - size):.0%} of them; "
                "batchwright reads exactly the global batch."
            )
    if "expansion_factor_real_data" in special:
        given = special["expansion_factor_real_data"]
        factor = fraction(given.value, "expansion_factor_real_data")
        if factor == 0 or (factor < 0 and factor != -1):
            raise ConfigError(
                f"expansion_factor_real_data={given.value} is neither -1 (every host reads) nor above zero.",
                field="expansion_factor_real_data",
                given=str(given.value),
                nearest=(-1, 1),
            )
        found["expansion_factor"] = Given(Fraction(1) if factor == -1 else factor, given.origin, given.level)
    if ramp:
        found["per_device"] = ramp
    if known("pipeline_parallel", 1) > 1:
        found["pipeline_style"] = Given("inner", "MaxText", -1)
        pieces = special.get("num_pipeline_microbatches")
        if pieces and str(pieces.value) != "-1":
            found["pipeline_microbatches"] = pieces
        if repeats := _repeats(special, known("pipeline_parallel", 1), notes):
            found["virtual_stages"] = repeats
    return found, notes


def _repeats(special: Fields, stages: int, notes: list[str]) -> Given | None:
    """How often a microbatch passes each device: as given, or from the number of layers."""
    given = special.get("num_pipeline_repeats")
    if given and str(given.value) != "-1":
        return given
    part, whole, each, model = (special.get(name) for name in _LAYERS)
    layers = part if part and str(part.value) != "-1" else whole
    if layers is whole and whole and whole.level == 0 and model and str(model.value) != "default":
        layers = None  # the model that model_name selects has its own layers, which the file does not have
    if layers is None:
        notes.append(
            "MaxText derives num_pipeline_repeats from the number of layers, which is not given: 1 is assumed."
        )
        return None
    total, per_stage = count(layers.value, "layers"), count(each.value, _LAYERS[2]) if each else 1
    repeats, over = divmod(total, stages * per_stage)
    division = f"{total} layers / ({stages} stages × {per_stage})"
    if over:
        notes.append(
            f"MaxText repeats the pipeline {division} = {total / (stages * per_stage):.2f} times: 1 is assumed."
        )
        return None
    return Given(repeats, division, max(layers.level, each.level if each else 0))


def _mesh(special: Fields, fields: Fields, notes: list[str]) -> Fields:
    """Sizes from the axes. `ici_fsdp` and `dcn_data`, unless they are set, and axes of -1 take the remaining devices."""
    used = {key: special[key] for key in _MESH if key in special}
    if not used:
        return {}
    sizes: dict[str, int] = {}
    for key, given in used.items():
        if str(given.value) != "-1":
            axis, size = _MESH[key], count(given.value, key)
            sizes[_AXES[axis]] = sizes.get(_AXES[axis], 1) * size
            if axis == "expert":
                sizes["expert_parallel"] = sizes.get("expert_parallel", 1) * size
    explicit = prod(size for name, size in sizes.items() if name != "expert_parallel")
    fills = [key for key, given in used.items() if str(given.value) == "-1"]
    fills += [key for key in ("ici_fsdp_parallelism", "dcn_data_parallelism") if key not in used]
    devices = _devices(fields)
    mesh = " ".join(f"{key}={given.value}" for key, given in used.items())
    if devices is not None and (devices % explicit or (not fills and devices != explicit)):
        raise ConfigError(
            f"the mesh {mesh} = {explicit} devices contradicts devices={devices}"
            + (f": {devices} / {explicit} = {devices / explicit:.2f}." if fills else ".")
            + f" Nearest: {either(nearest_multiples(explicit, devices) if fills else (explicit,))} devices.",
            field="devices",
            given=devices,
            nearest=nearest_multiples(explicit, devices) if fills else (explicit,),
        )
    known = {"data_parallel_size", "global_batch_size", "global_batch_size_tokens"} & set(fields)
    if (devices is not None and fills) or known:
        sizes.pop("data_parallel_size", None)  # derived from the number of devices
    elif asked := [key for key, given in used.items() if str(given.value) == "-1" and given.level > 0]:
        # At level 0, in a file, -1 may be one of MaxText's defaults.
        raise ConfigError(
            f"{' and '.join(f'{key}=-1' for key in asked)} takes the devices that the other axes leave, and the number of "
            "devices is not given. Give devices, or nodes and devices_per_node.",
            field="devices",
        )
    elif "ici_fsdp_parallelism" in fills and ("data_parallel_size" in sizes or "ici_fsdp_parallelism" in used):
        notes.append(
            f"The number of devices is not given: {' and '.join(fills)} would take the remaining devices; 1 is assumed."
        )
    level = max(given.level for given in used.values())

    def those(name: str) -> str:
        """The keys that a field was derived from; without those of size 1, unless all are 1."""
        about = {k: g for k, g in used.items() if name in (_AXES[_MESH[k]], f"{_MESH[k]}_parallel")}
        shown = {k: g for k, g in about.items() if str(g.value) != "1"} or about
        return " ".join(f"{key}={given.value}" for key, given in shown.items())

    return {name: Given(size, those(name), level) for name, size in sizes.items()}


def _ramp(special: Fields) -> Given | None:
    """MaxText's ramp keys and the final size, as START,INCREMENT,END,SAMPLES; None if the ramp is off."""
    given = special.get("enable_rampup_batch_size")
    if given is None or not switch(given.value, "enable_rampup_batch_size"):
        return None
    start, increment, samples = (
        special[key].value if key in special else default
        for key, default in _RAMP.items()
        if not key.startswith("enable")
    )
    end = special["per_device_batch_size"].value if "per_device_batch_size" in special else "12.0"
    return Given((start, increment, end, samples), "enable_rampup_batch_size", given.level)


def _devices(fields: Fields) -> int | None:
    if "devices" in fields:
        return count(fields["devices"].value, "devices")
    if {"nodes", "devices_per_node"} <= set(fields):
        return count(fields["nodes"].value, "nodes") * count(fields["devices_per_node"].value, "devices_per_node")
    return None


def _decimal(value: Fraction) -> str:
    return str(float(value)) if float(value) == value else str(value)


DIALECT = Dialect(
    name="maxtext",
    title="MaxText",
    keys={
        "max_target_length": "sequence_length",
        "pipeline_delay_activation_forwarding": "delayed_forwarding",
    },
    special=frozenset(_SPECIAL),
    resolve=_resolve,
)
