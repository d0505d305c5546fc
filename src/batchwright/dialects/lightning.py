"""PyTorch Lightning's CLI: `data.batch_size` per device, `trainer.accumulate_grad_batches`, `devices` and `num_nodes`."""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import count

from .deepspeed import mean_of_micro_batches
from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, error, note

_SIZES = (
    "data.batch_size",
    "data.init_args.batch_size",
    "model.batch_size",
    "model.init_args.batch_size",
)
_SCHEDULER = "GradientAccumulationScheduler"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """`devices` is a number, a list of indices, or a choice at run time (`auto`, -1)."""
    given = special.get("trainer.devices")
    if given is None:
        return {}, []
    value = given.value
    if isinstance(value, str) and "," in value:
        value = [part for part in value.strip("[]() ").split(",") if part.strip()]
    if isinstance(value, list):
        return {"devices_per_node": Given(len(value), given.origin, given.level)}, []
    if str(value) in ("auto", "-1"):
        return {}, [f"trainer.devices={value}: Lightning takes every device that it finds. Give devices_per_node."]
    return {"devices_per_node": Given(count(value, "trainer.devices"), given.origin, given.level)}, []


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    steps = str(reading.value("trainer.accumulate_grad_batches", 1))
    callbacks = reading.value("trainer.callbacks") or []
    named = (
        [one for one in callbacks if isinstance(one, dict) and _SCHEDULER in str(one.get("class_path", ""))]
        if isinstance(callbacks, list)
        else []
    )
    if named:
        found.append(
            note(
                "grows-by-epoch",
                f"{_SCHEDULER} changes the accumulation by epoch. Epochs need the size of the dataset, so the batch "
                "here is the one of trainer.accumulate_grad_batches.",
                "trainer.callbacks",
            )
        )
        if steps != "1":
            found.append(
                error(
                    "excluded-key",
                    f"{_SCHEDULER} and trainer.accumulate_grad_batches={steps}: Lightning refuses both. Nearest: 1.",
                    "trainer.accumulate_grad_batches",
                    (1,),
                )
            )
    if steps != "1":
        found.append(mean_of_micro_batches("Lightning"))
        if "trainer.val_check_interval" in reading.given:
            found.append(
                note(
                    "counts-micro-steps",
                    f"trainer.val_check_interval={reading.value('trainer.val_check_interval')} counts micro batches, not "
                    f"optimizer steps: {steps} of them make a step.",
                    "trainer.val_check_interval",
                )
            )
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    made = job.named(
        {
            "data.batch_size": "micro_batch_size",
            "trainer.accumulate_grad_batches": "accumulation_steps",
        }
    )
    names = {"nodes": "trainer.num_nodes", "devices_per_node": "trainer.devices"}
    made |= {names[name]: number for name, number in job.placed().items()}
    if "data.batch_size" not in made:
        raise ConfigError(
            "Lightning counts the batch per device, and micro_batch_size is not known. Give devices.", field="devices"
        )
    return made


DIALECTS = (
    Dialect(
        name="lightning",
        title="Lightning",
        aliases=("pytorch-lightning", "pl"),
        keys={
            **dict.fromkeys(_SIZES, "micro_batch_size"),
            "trainer.accumulate_grad_batches": "accumulation_steps",
            "trainer.num_nodes": "nodes",
        },
        special=frozenset({"trainer.devices"}),
        resolve=_resolve,
        common=frozenset({"trainer.accumulate_grad_batches", "trainer.num_nodes", "trainer.devices"}),
        signs=(
            "seed_everything",
            "model.class_path",
            "data.class_path",
            "data.batch_size",
            "data.init_args.batch_size",
        ),
        checked=frozenset({"trainer.callbacks", "trainer.val_check_interval"}),
        steps={"trainer.max_steps": "budget", "trainer.log_every_n_steps": "log"},
        defaults={"trainer.accumulate_grad_batches": 1, "trainer.num_nodes": 1},
        beside=("deepspeed", "accelerate"),
        check=_check,
        write=_write,
        has_world=True,
        source="Lightning 2.6: trainer/trainer.py, callbacks/gradient_accumulation_scheduler.py",
    ),
)
