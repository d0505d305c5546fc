"""MaxText: `per_device_batch_size` counts *all* devices, may be below 1, and the mesh is `ici_…` × `dcn_…`.

    global batch = devices × per_device_batch_size × gradient_accumulation_steps
    micro_batch_size here = per_device_batch_size × devices per replica (tensor × pipeline × context)

MaxText truncates sizes that are not whole (`int(devices × per_device)`); batchwright refuses them.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, prod
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, fraction, nearest_multiples, positive

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, error, note

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
        if 0 < factor < 1:
            notes.append(
                f"MaxText's current code also multiplies its load batch by expansion_factor_real_data: with {factor} it loads "
                f"{factor} of the batch that it trains on, and its stored states had {1 / factor} times the rows per host. "
                "Here the load batch is the global batch."
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


def _check(reading: Reading) -> list[Finding]:
    """What MaxText's own checks leave out."""
    found: list[Finding] = []
    ramp = reading.on("enable_rampup_batch_size")
    if ramp and "pipeline_parallel" in reading.fields and str(reading.fields["pipeline_parallel"].value) != "1":
        found.append(
            error(
                "ramp-with-pipeline",
                "enable_rampup_batch_size and pipeline parallelism do not work together in MaxText: the pipeline reshapes "
                "every batch to the full configured one, and no check of MaxText says so.",
                "enable_rampup_batch_size",
            )
        )
    if not ramp and (unused := [key for key in _RAMP if key in reading.given and not key.startswith("enable")]):
        found.append(
            note("ignored-key", f"{', '.join(unused)}: read only with enable_rampup_batch_size=true.", unused[0])
        )
    steps = reading.value("gradient_accumulation_steps", 1)
    if str(steps) not in ("1", "1.0"):
        if ramp:
            found.append(
                note(
                    "ramp-with-accumulation",
                    f"gradient_accumulation_steps={steps}: MaxText's ramp manager leaves accumulation out of its sizes, its "
                    "configuration includes it. The sizes here include it.",
                    "gradient_accumulation_steps",
                )
            )
        found.append(
            note(
                "rows-of-a-micro-batch",
                f"Micro batch i of {steps} takes rows i, i + {steps}, i + 2 × {steps}, … of the global batch.",
                "gradient_accumulation_steps",
            )
        )
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    """Sizes per device: the micro batch divided by the devices of a replica. All devices of the job count."""
    micro, steps = job.need("micro_batch_size", "MaxText counts the batch per device"), job.get("accumulation_steps", 1)
    axes = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "context": "context_parallel"}
    sizes = {axis: job.get(name, 1) for axis, name in axes.items()}
    replica = prod(sizes.values())
    made: dict[str, Any] = {}
    if sizes["pipeline"] > 1:
        passes = job.get("pipeline_passes", 1)
        pieces = steps // passes
        micro, steps = micro * pieces, passes
        made["num_pipeline_microbatches"] = pieces
        made |= job.named({"num_pipeline_repeats": "virtual_stages"})
    if job.get("expert_parallel", 1) > 1:
        sizes["expert"] = job.get("expert_parallel")
    mesh = {f"ici_{axis}_parallelism": size for axis, size in sizes.items() if size > 1}
    batch = {"per_device_batch_size": _per_device(micro, replica), "gradient_accumulation_steps": steps}
    others = {
        "max_target_length": "sequence_length",
        "pipeline_delay_activation_forwarding": "delayed_forwarding",
    }
    made = {**batch, **made, **mesh, **job.named(others)}
    if "expansion_factor" in job.numbers:
        made["expansion_factor_real_data"] = float(job.get("expansion_factor"))
    if job.schedule is not None and len(job.schedule.segments) > 1:
        made |= _write_ramp(job, steps, replica)
    return made


def _per_device(size: int | Fraction, parts: int) -> float | int:
    exact = Fraction(size) / parts
    if Fraction(str(float(exact))) != exact:
        raise ConfigError(
            f"per_device_batch_size must be a decimal number: {size} samples / {parts} devices = {float(exact):g}… is not one.",
            field="per_device_batch_size",
        )
    return int(exact) if exact.denominator == 1 else float(exact)


def _write_ramp(job: Job, steps: int, replica: int) -> dict[str, Any]:
    """MaxText's ramp changes the size per device and keeps the accumulation: one that divides every stage."""
    from .ramps import triple

    devices, ramp = job.need("devices", "MaxText's ramp counts samples per device"), triple(job)
    if ramp is None:
        return {}
    start, increment, samples = ramp
    ranks, target = devices // replica, job.get("global_batch_size")
    steps = gcd(steps, *(size // ranks for size in (start, increment, target)))
    return {
        "per_device_batch_size": _per_device(target, devices * steps),
        "gradient_accumulation_steps": steps,
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": _per_device(start, devices * steps),
        "per_device_batch_size_increment": _per_device(increment, devices * steps),
        "global_rampup_samples": samples,
    }


def _resolve_rl(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """The training micro batch of one rank: MaxText counts the prompts of all ranks."""
    given = special.get("train_micro_batch_size")
    if given is None:
        return {}, []
    ranks = count(fields["data_parallel_size"].value, "data_parallel_size") if "data_parallel_size" in fields else 1
    if ranks == 1 or str(given.value).strip().lower() in ("-1", "none", "null"):
        return {"train_micro_prompts": given}, []
    prompts = count(given.value, "train_micro_batch_size")
    if prompts % ranks:
        near = nearest_multiples(ranks, prompts)
        raise ConfigError(
            f"train_micro_batch_size={prompts} counts the prompts of all ranks and must be a multiple of "
            f"data_parallel_size {ranks}: {prompts} / {ranks} = {prompts / ranks:.2f}. Nearest: {either(near)}.",
            field="train_micro_batch_size",
            given=prompts,
            nearest=near,
        )
    return {"train_micro_prompts": Given(prompts // ranks, given.origin, given.level)}, []


def _check_rl(reading: Reading) -> list[Finding]:
    key = reading.first("rl.num_generations", "num_generations")
    if str(reading.value(key or "", 2)) == "1":
        return [error("one-generation", f"{key}=1: tunix requires num_generations above 1.", key, (2,))]
    return []


def _write_rl(job: Job, version: Version) -> dict[str, Any]:
    """One update per round; micro batches count the prompts of all ranks."""
    if job.get("updates", 1) != 1:
        raise ConfigError(
            f"updates={job.get('updates')}: MaxText trains one update per round and iteration. Nearest: 1.",
            field="updates",
        )
    made = job.named({"batch_size": "prompts", "rl.num_generations": "generations", "rl.num_iterations": "iterations"})
    micro, group = job.get("train_micro_responses"), job.get("generations", 1)
    ranks = job.get("data_parallel_size", 1)
    if micro is not None and micro * ranks != job.get("prompts") * group:  # all at once needs no key
        if micro % group:
            raise ConfigError(
                f"train_micro_responses={micro}: MaxText counts micro batches in prompts, and {micro} / {group} generations = "
                f"{micro / group:.2f}. Nearest: {either(nearest_multiples(group, micro))} responses.",
                field="train_micro_responses",
                given=micro,
                nearest=nearest_multiples(group, micro),
            )
        made["train_micro_batch_size"] = micro // group * ranks
    return made | job.named({"rollout_micro_batch_size": "rollout_micro_prompts"})


DIALECTS = (
    Dialect(
        name="maxtext",
        title="MaxText",
        keys={
            "max_target_length": "sequence_length",
            "pipeline_delay_activation_forwarding": "delayed_forwarding",
            "gradient_accumulation_steps": "accumulation_steps",
        },
        special=frozenset(_SPECIAL),
        resolve=_resolve,
        common=frozenset({"gradient_accumulation_steps", "model_name"}),
        signs=("per_device_batch_size", "base_emb_dim", "enable_checkpointing", "dataset_type"),
        programs=("MaxText", "maxtext"),
        steps={
            "steps": "budget",
            "checkpoint_period": "save",
            "eval_interval": "eval",
            "log_period": "log",
            "learning_rate_schedule_steps": "decay",
        },
        defaults={"per_device_batch_size": 12.0, "gradient_accumulation_steps": 1},
        check=_check,
        write=_write,
        form="keys",
        source="MaxText e591f30cb: configs/base.yml, configs/types.py, utils/rampup_batch.py",
    ),
    Dialect(
        name="maxtext-rl",
        title="MaxText RL",
        kind="rl",
        keys={
            "batch_size": "prompts",
            "rl.num_generations": "generations",
            "num_generations": "generations",
            "rollout_micro_batch_size": "rollout_micro_prompts",
            "rl.num_iterations": "iterations",
            "num_iterations": "iterations",
            "micro_batch_size": "micro_batch_size",  # the single key of MaxText's page
        },
        special=frozenset({"train_micro_batch_size"}),
        resolve=_resolve_rl,
        common=frozenset({"micro_batch_size"}),
        signs=("rl.num_generations", "num_batches", "rl.grpo_beta", "rl.loss_algo"),
        programs=("train_rl",),
        defaults={"batch_size": 1, "rl.num_generations": 2},
        all_at_once=True,
        check=_check_rl,
        write=_write_rl,
        form="keys",
        unit="prompts",
        source="MaxText e591f30cb: configs/post_train/rl.yml, trainers/post_train/rl/train_rl.py; tunix 0.1.7",
    ),
)
