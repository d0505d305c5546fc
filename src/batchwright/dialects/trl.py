"""TRL: SFT has the keys of TrainingArguments; GRPO and RLOO count responses, and generate once for several steps.

generation batch = per_device_train_batch_size × processes × steps_per_generation responses
update           = per_device_train_batch_size × processes × gradient_accumulation_steps responses
"""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import ConfigError, Violation, either, raise_violations
from batchwright.core.numbers import count, divisors, nearest_divisors, nearest_multiples, nearest_of

from . import huggingface
from .record import DEFAULT, RL_FIELDS, Dialect, Fields, Finding, Given, Job, Reading, Version, error, origins

_MICRO, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_ROUND, _EVERY, _GROUP = "generation_batch_size", "steps_per_generation", "num_generations"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Prompts, updates and micro batches of a round, from what TRL counts in responses."""
    notes: list[str] = []
    wrong: list[Violation] = []

    def number(key: str, default: int) -> int:
        return count(special[key].value, key) if key in special else default

    micro, steps, group = number(_MICRO, 8), number(_STEPS, 1), number(_GROUP, 8)
    ranks = count(fields["data_parallel_size"].value, "data_parallel_size") if "data_parallel_size" in fields else None
    if ranks is None:
        ranks = 1
        notes.append("The number of processes is not given: 1 is assumed.")
    at_once = micro * ranks
    every = number(_EVERY, steps)
    if _ROUND in special and _EVERY in special:
        wrong.append(Violation(f"{_ROUND} and {_EVERY} exclude each other in TRL. Give one.", _ROUND))
    elif _ROUND in special:
        responses = number(_ROUND, 0)
        every, over = divmod(responses, at_once)
        if over or not every:
            near = nearest_multiples(at_once, responses)
            wrong.append(
                Violation(
                    f"{_ROUND}={responses} must be a multiple of {_MICRO} {micro} × {ranks} processes = {at_once}: {responses} / "
                    f"{at_once} = {responses / at_once:.2f}. Nearest: {either(near)}.",
                    _ROUND,
                    responses,
                    near,
                )
            )
            raise_violations(ConfigError, wrong)
    responses = at_once * every
    if responses % group:
        near = nearest_divisors(responses, group)
        wrong.append(
            Violation(
                f"{_GROUP}={group} does not divide the generation batch: {_MICRO} {micro} × {ranks} processes × {every} steps = "
                f"{responses} responses, and {responses} / {group} = {responses / group:.2f} prompts. Nearest: {either(near)}.",
                _GROUP,
                group,
                near,
            )
        )
    if every % steps:
        near = nearest_multiples(steps, every)
        wrong.append(
            Violation(
                f"updates span rounds: {_EVERY}={every} is not a whole number of updates, {every} / {_STEPS} {steps} = "
                f"{every / steps:.2f}. TRL accepts it: an update then learns from two rounds, which two policies sampled, and "
                f"may split a group between updates. Nearest: {either(near)}.",
                _EVERY,
                every,
                near,
            )
        )
    elif at_once * steps % group and not wrong:
        works = [n for n in divisors(every) if at_once * n % group == 0]
        near = nearest_of(works, steps)
        wrong.append(
            Violation(
                f"split groups: an update has {_MICRO} {micro} × {ranks} processes × {_STEPS} {steps} = {at_once * steps} "
                f"responses, and {at_once * steps} / {_GROUP} {group} = {at_once * steps / group:.2f} groups. TRL accepts it: it "
                f"shuffles responses over the updates of a round. Nearest: {either(near)} for {_STEPS}.",
                _STEPS,
                steps,
                near,
            )
        )
    raise_violations(ConfigError, wrong)

    def derived(value: int, *keys: str) -> Given:
        used = [special[key] for key in keys if key in special]
        return Given(value, origins(*used), max((g.level for g in used), default=DEFAULT))

    found = {
        "prompts": derived(responses // group, _MICRO, _EVERY if _EVERY in special else _STEPS, _ROUND, _GROUP),
        "generations": derived(group, _GROUP),
        "updates": derived(every // steps, _EVERY, _ROUND, _STEPS),
        "train_micro_responses": derived(micro, _MICRO),
    }
    return found, notes


def _check_grpo(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    if str(reading.value(_GROUP, 8)) == "1":
        found.append(error("one-generation", f"{_GROUP}=1: TRL requires at least 2.", _GROUP, (2,)))
    if reading.on("auto_find_batch_size"):
        found.append(
            error(
                "excluded-key",
                "auto_find_batch_size=true: TRL refuses it for GRPO, because a smaller batch would split groups.",
                "auto_find_batch_size",
                ("false",),
            )
        )
    return found


def _write_grpo(job: Job, version: Version) -> dict[str, Any]:
    """per_device × processes × accumulation = responses of an update; a round has whole updates."""
    from batchwright.core.rl import rl

    made = rl(**{name: value for name, value in job.numbers.items() if name in RL_FIELDS})
    keys: dict[str, Any] = {
        _MICRO: made.train_micro_responses,
        _STEPS: made.accumulation_steps,
        _GROUP: made.generations_per_prompt,
    }
    if made.updates_per_pass > 1:
        keys[_EVERY] = made.updates_per_pass * made.accumulation_steps
    return keys | ({"num_iterations": made.iterations} if made.iterations > 1 else {})


DIALECTS = (
    Dialect(
        name="trl",
        title="TRL",
        aliases=("trl-sft", "sft"),
        keys=huggingface.KEYS,
        special=frozenset({huggingface.SPLIT}),
        resolve=huggingface.resolve,
        common=frozenset({*huggingface.KEYS, huggingface.SPLIT}),
        signs=("assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing", "padding_free"),
        programs=("trl", "sft.py"),
        checked=huggingface.CHECKED,
        gradient=huggingface.AVERAGED,
        steps=huggingface.STEPS,
        defaults={_MICRO: 8, _STEPS: 1},
        beside=("deepspeed", "accelerate"),
        check=huggingface.check,
        write=huggingface.write,
        source="trl 1.16: trainer/sft_config.py",
    ),
    Dialect(
        name="trl-grpo",
        title="TRL GRPO",
        kind="rl",
        aliases=("grpo", "trl-rloo"),
        keys={"num_iterations": "iterations"},
        special=frozenset({_MICRO, _STEPS, _ROUND, _EVERY, _GROUP}),
        resolve=_resolve,
        common=frozenset({_GROUP, "num_iterations"}),
        signs=(_ROUND, _EVERY, "max_completion_length", "scale_rewards", "use_vllm", "reward_funcs"),
        together=frozenset({_MICRO, _GROUP}),
        programs=("grpo",),
        checked=frozenset({"auto_find_batch_size"}),
        steps=huggingface.STEPS,
        defaults={_MICRO: 8, _STEPS: 1, _GROUP: 8},
        check=_check_grpo,
        write=_write_grpo,
        unit="responses",
        source="trl 1.16: trainer/grpo_config.py",
    ),
)
