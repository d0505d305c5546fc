"""What the frameworks' own code makes of random configurations, recorded as vectors in tests/vectors/frameworks.

    python -m tests.dialects.oracles PACKAGES [--check]

PACKAGES is a folder with one folder per package, as tests/versions.sh installs them; transformers and trl are those of this
Python. Without --check the vectors are written; with it, they are made again and must be the recorded ones. A package whose
dependencies are large is not imported: the functions that count are compiled from its files, as they are.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors" / "frameworks"
VERSIONS = {
    "megatron-core-0.16": "0.16.1",
    "megatron-core-0.19": "0.19.2",
    "deepspeed": "0.19.8",
    "levanter": "1.2.dev1644",
    "ai2-olmo-core": "3.0.0",
    "llm-foundry": "0.22.0",
    "axolotl": "0.19.0",
    "verl": "0.9.1",
    "torchtitan": "0.3.0",
    "llamafactory": "0.9.5",
    "nanotron": "0.4",
    "openrlhf": "0.11.2",
    "megatron-bridge": "0.3.1",
    "google-tunix": "0.1.7",
}
Cases = list[dict[str, Any]]


def loaded(path: Path) -> ModuleType:
    """A module that imports the standard library only, from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def lifted(path: Path, names: Iterable[str], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Functions and methods of a file by name (`function`, `Class.method`), compiled without the rest of the file."""
    wanted = dict.fromkeys(names)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for outer in ast.walk(tree):
        for node in outer.body if isinstance(outer, (ast.Module, ast.ClassDef)) else ():
            name = (
                f"{outer.name}.{node.name}"
                if isinstance(outer, ast.ClassDef) and hasattr(node, "name")
                else getattr(node, "name", "")
            )
            setter = any(getattr(d, "attr", "") == "setter" for d in getattr(node, "decorator_list", []))
            if isinstance(node, ast.FunctionDef) and f"{name}{'=' * setter}" in wanted:
                node.decorator_list, node.returns = [], None
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    argument.annotation = None
                space = {"math": math, "LOG": logging.getLogger("x"), "log": logging.getLogger("x"), **(given or {})}
                exec(compile(ast.Module([node], []), str(path), "exec"), space)
                found[f"{name}{'=' * setter}"] = space[node.name]
    assert set(found) == set(wanted), f"{path}: {set(wanted) - set(found)} not found"
    return found


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call returns, or that it refuses."""
    try:
        return {"result": call()}
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        return {"refused": type(error).__name__}


def walk(size_at: Callable[[int], int], past: int) -> list[list[int]]:
    """[first step, batch] of every stage, up to the first step at or after sample `past`."""
    stages: list[list[int]] = []
    step = sample = 0
    while True:
        size = size_at(sample)
        if not stages or stages[-1][1] != size:
            stages.append([step, size])
        if sample >= past:
            return stages
        step, sample = step + 1, sample + size


def _checked(calculator: Any) -> Callable[[int], int]:
    def at(sample: int) -> int:
        calculator.update(sample, True)
        return calculator.get_current_global_batch_size()

    return at


def megatron_linear(folder: Path, random: Random) -> Cases:
    module = loaded(folder / "megatron/core/num_microbatches_calculator.py")
    cases: Cases = [{"start": 32, "increment": 8, "samples": 9384, "target": 88, "micro": 1, "ranks": 8}]
    for _ in range(150):
        micro, ranks = random.choice((1, 2)), random.choice((1, 2, 4))
        quantum = micro * ranks * random.choice((1, 1, 1, 1, 2)) if random.random() < 0.9 else random.randint(1, 9)
        start, grows = quantum * random.randint(1, 6), random.randint(1, 9)
        increment = quantum * random.randint(1, 3)
        cases.append(
            {
                "start": start, "increment": increment, "samples": random.randint(1, 40) * start + random.randint(0, 99),
                "target": start + increment * grows, "micro": micro, "ranks": ranks,
            }
        )  # fmt: skip
    for case in cases:

        def stages(case: dict[str, Any] = case) -> Any:
            made = module.RampupBatchsizeNumMicroBatchesCalculator(
                case["target"],
                case["micro"],
                case["ranks"],
                False,
                1,
                case["start"],
                case["increment"],
                case["samples"],
            )
            return walk(_checked(made), case["samples"] + case["target"])

        case |= outcome(stages)
    return cases


def megatron_constant(folder: Path, random: Random) -> Cases:
    module = loaded(folder / "megatron/core/num_microbatches_calculator.py")
    cases: Cases = []
    for _ in range(150):
        case = {"micro": random.randint(1, 8), "ranks": random.randint(1, 16), "shrink": random.random() < 0.3}
        case["batch"] = case["micro"] * case["ranks"] * random.randint(1, 8) + random.choice((0, 0, 0, 1, 3))

        def numbers(case: dict[str, Any] = case) -> Any:
            made = module.ConstantNumMicroBatchesCalculator(
                case["batch"], case["micro"], case["ranks"], case["shrink"], 1
            )
            return [made.get(), made.get_current_running_global_batch_size()]

        cases.append(case | outcome(numbers))
    return cases


def megatron_steps(folder: Path, random: Random) -> Cases:
    module = loaded(folder / "megatron/core/num_microbatches_calculator.py")
    cases: Cases = []
    for _ in range(150):
        micro, ranks, length = random.choice((1, 2)), random.choice((1, 2, 4)), random.choice((64, 100, 1024))
        quantum, at, size, pairs = micro * ranks, 0, 0, list[str]()
        for _ in range(random.randint(1, 5)):
            size += quantum * random.randint(1, 4)
            pairs.append(f"{at}:{size}")
            at += random.randint(1, 30) * size * length + random.randint(0, length)
        text = " ".join(pairs).replace("000:", "K:")
        case = {"schedule": text, "length": length, "micro": micro, "ranks": ranks}

        def stages(case: dict[str, Any] = case, at: int = at) -> Any:
            made = module.StepBatchsizeNumMicroBatchesCalculator(
                case["micro"], case["ranks"], False, 1, case["schedule"], case["length"]
            )
            return walk(_checked(made), at // case["length"] + 1)

        cases.append(case | outcome(stages))
    build = module._build_num_microbatches_calculator
    arguments = build.__code__.co_varnames[: build.__code__.co_argcount]
    return [*cases, {"takes_rampup_batch_size": "rampup_batch_size" in arguments}]


def deepspeed(folder: Path, random: Random) -> Cases:
    sys.path[:0] = [str(folder)]
    from deepspeed.runtime.config import DeepSpeedConfig  # pyright: ignore[reportMissingImports]

    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    cases: Cases = []
    for _ in range(300):
        micro, steps, world = random.randint(1, 8), random.randint(1, 8), random.randint(1, 16)
        values = (micro * steps * world + random.choice((0, 0, 0, 1, world)), micro, steps)
        keys = {name: value for name, value in zip(names, values, strict=True) if random.random() < 0.7}

        def numbers(keys: dict[str, int] = keys, world: int = world) -> Any:
            config = DeepSpeedConfig.__new__(DeepSpeedConfig)
            config.world_size = world
            for name in names:
                setattr(config, name, keys.get(name))
            config._configure_train_batch_size()
            return [getattr(config, name) for name in names]

        cases.append({"keys": keys, "world": world} | outcome(numbers))
    return cases


def levanter(folder: Path, random: Random) -> Cases:
    module = loaded(folder / "levanter/schedule.py")
    cases: Cases = []
    for _ in range(100):
        start, phases = 0, list[dict[str, int]]()
        for _ in range(random.randint(1, 6)):
            phases.append({"start": start, "value": random.randint(1, 64)})
            start += random.randint(1, 200)
        made = module.BatchSchedule([module.ScheduleStep(**phase) for phase in phases])
        steps = sorted({random.randint(0, start + 50) for _ in range(8)})
        result = [[step, made.batch_size_at_step(step), made.global_data_offset_by_step(step)] for step in steps]
        cases.append({"train_batch_size": phases, "result": result})
    return cases


def olmo(folder: Path, random: Random) -> Cases:
    """The callback and the data loader's setter, called before every batch as the trainer does."""
    names = ["BatchSizeSchedulerCallback._maybe_update_batch_size_and_lr"]
    update = lifted(folder / "olmo_core/train/callbacks/batch_size_scheduler.py", names)[names[0]]
    names = ["DataLoaderBase.global_batch_size="]
    setter = lifted(folder / "olmo_core/data/data_loader.py", names, {"OLMoConfigurationError": ValueError})[names[0]]

    class Loader:
        def __init__(self, size: int) -> None:
            self._global_batch_size, self.batches_processed = size, 0

        global_batch_size = property(lambda self: self._global_batch_size, setter)

    cases: Cases = [{"sizes": [1, 2], "starts": [0, 11], "unit": "steps"}]
    for _ in range(150):
        unit, size, at = random.choice(("steps", "tokens")), random.randint(1, 4), 0
        sizes, starts = [size], [0]
        for _ in range(random.randint(1, 4)):
            factor = random.choice((2, 2, 3, 4))
            falls = random.random() < 0.15 and size % factor == 0
            size = size // factor if falls else size * factor
            at += random.randint(1, 40) * (1 if unit == "steps" else sizes[-1])
            sizes.append(size)
            starts.append(at)
        cases.append({"sizes": sizes, "starts": starts, "unit": unit})
    for case in cases:
        loader, unit = Loader(case["sizes"][0]), case["unit"]
        trainer = SimpleNamespace(data_loader=loader, global_step=0, global_train_tokens_seen=0, epoch=1)

        class Due:
            def __init__(self, value: int, unit: str = unit) -> None:
                self.value, self.unit = value, unit

            def due(self, *, step: int, tokens: int, epoch: int) -> bool:
                return (step if self.unit == "steps" else tokens) >= self.value

        def change(size: int, loader: Any = loader) -> None:
            loader.global_batch_size = size

        callback = SimpleNamespace(
            enabled=True, batch_sizes=case["sizes"], schedule=[Due(value) for value in case["starts"]], trainer=trainer,
            _update_batch_size_and_lr=change,
        )  # fmt: skip
        stages: list[list[int]] = []
        try:
            for step in range(4000):
                callback.current_batch_size = loader.global_batch_size
                update(callback)
                size = loader.global_batch_size
                if not stages or stages[-1][1] != size:
                    stages.append([step, size])
                loader.batches_processed += 1
                trainer.global_step += 1
                trainer.global_train_tokens_seen += size
            case["result"] = stages
        except AssertionError:
            case["refused"] = "AssertionError"
    return cases


def foundry(folder: Path, random: Random) -> Cases:
    path = folder / "llmfoundry/utils/config_utils.py"
    cases: Cases = []
    for _ in range(150):
        world, micro = random.randint(1, 16), random.randint(1, 8)
        batch = world * random.randint(1, 20) + random.choice((0, 0, 0, 1))
        dist = SimpleNamespace(get_world_size=lambda world=world: world)
        function = lifted(path, ["calculate_batch_size_info"], {"dist": dist})["calculate_batch_size_info"]
        case = {"global_train_batch_size": batch, "device_train_microbatch_size": micro, "world": world}
        cases.append(case | outcome(lambda function=function, batch=batch, micro=micro: list(function(batch, micro))))
    return cases


def axolotl(folder: Path, random: Random) -> Cases:
    names = [f"TrainingValidationMixin.{name}" for name in ("check_batch_size_fields", "check_gas_bsz")]
    names.append("RLValidationMixin.check_grpo_batch_size_divisibility")
    checks = lifted(folder / "axolotl/utils/schemas/validation.py", names)
    cases: Cases = []
    for _ in range(150):
        keys: dict[str, Any] = {}
        for name in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"):
            if random.random() < 0.6:
                keys[name] = random.randint(1, 12)
        if random.random() < 0.5:
            keys |= {"rl": "grpo", "trl": {"num_generations": random.randint(1, 8)}}
        gpus = random.choice((1, 1, 2, 4))  # what Axolotl finds in WORLD_SIZE

        def refuses(keys: dict[str, Any] = keys, gpus: int = gpus) -> Any:
            for check in checks.values():
                check(None, keys | {"capabilities": {"n_gpu": gpus}})
            return True

        cases.append({"keys": keys, "gpus": gpus} | outcome(refuses))
    return cases


def verl(folder: Path, random: Random) -> Cases:
    validate = lifted(folder / "verl/workers/config/actor.py", ["ActorConfig.validate"])["ActorConfig.validate"]
    cases: Cases = []
    for _ in range(150):
        case = {
            "train": random.choice((32, 64, 100, 128)), "mini": random.choice((16, 32, 64, 256)),
            "micro": random.choice((None, 4, 8, 16)), "gpus": random.choice((1, 4, 8)),
        }  # fmt: skip
        actor = SimpleNamespace(
            use_dynamic_bsz=False, ppo_mini_batch_size=case["mini"], ppo_micro_batch_size=case["micro"],
            ulysses_sequence_parallel_size=1,
        )  # fmt: skip
        cases.append(case | outcome(lambda actor=actor, case=case: validate(actor, case["gpus"], case["train"])))
    return cases


def torchtitan(folder: Path, random: Random) -> Cases:
    """The statements of its Trainer from the batch to the accumulation, with the defaults of its configuration."""
    trainer = ast.parse((folder / "torchtitan/trainer.py").read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(trainer) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    [body] = [n.body for n in functions if "config.training.global_batch_size" in ast.unparse(n)]
    texts = [ast.unparse(statement) for statement in body]
    first = next(n for n, text in enumerate(texts) if text.startswith("global_batch_size = config"))
    last = next(n for n, text in enumerate(texts) if text.startswith("self.num_pipeline_parallel_microbatches"))
    code = compile(ast.Module(body[first:last], []), "trainer.py", "exec")
    fields: dict[str, Any] = {}
    for node in ast.walk(ast.parse((folder / "torchtitan/config/configs.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                fields.setdefault(node.target.id, ast.literal_eval(node.value))
            except ValueError:
                continue
    cases: Cases = []
    for _ in range(100):
        local, ranks = random.choice((None, 1, 2, 4, 8)), random.choice((1, 2, 3, 8))
        batch = random.choice((None, -1, (local or 8) * ranks * random.randint(1, 6), random.randint(1, 99)))
        keys = {k: v for k, v in (("local_batch_size", local), ("global_batch_size", batch)) if v is not None}
        training = SimpleNamespace(**({n: fields[n] for n in ("local_batch_size", "global_batch_size")} | keys))
        parallel = SimpleNamespace(pipeline_parallel_microbatch_size=fields["pipeline_parallel_microbatch_size"])
        made = SimpleNamespace()
        space = {
            "config": SimpleNamespace(training=training, parallelism=parallel),
            "batch_degree": ranks,
            "self": made,
        }

        def numbers(space: dict[str, Any] = space, made: Any = made, training: Any = training) -> Any:
            exec(code, space)
            return [space["global_batch_size"], training.local_batch_size, made.gradient_accumulation_steps]

        cases.append({"training": keys, "ranks": ranks} | outcome(numbers))
    return cases


def llama_factory(folder: Path, random: Random) -> Cases:
    """The statements of v1's loader that derive the number of micro batches."""
    tree = ast.parse((folder / "llamafactory/v1/core/utils/batching.py").read_text(encoding="utf-8"))
    [block] = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "self.global_batch_size is None" in ast.unparse(n.test)
    ]
    code = compile(ast.Module([block], []), "batching.py", "exec")
    cases: Cases = []
    for _ in range(100):
        micro, ranks = random.randint(1, 8), random.randint(1, 8)
        batch = random.choice((None, micro * ranks * random.randint(1, 8), random.randint(1, 99)))
        made = SimpleNamespace(global_batch_size=batch)
        space = {"self": made, "dp_size": ranks, "micro_batch_size": micro, "global_batch_size": batch}

        def numbers(space: dict[str, Any] = space, made: Any = made) -> Any:
            exec(code, space)
            return [made.global_batch_size, made.num_micro_batch]

        cases.append({"micro": micro, "batch": batch, "ranks": ranks} | outcome(numbers))
    return cases


def transformers(_: Path, random: Random) -> Cases:
    """TrainingArguments on several processes: their number is all that a machine with one cannot give."""
    import tempfile

    from transformers import TrainingArguments

    cases: Cases = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(20):
            keys = {
                "per_device_train_batch_size": random.randint(1, 8),
                "gradient_accumulation_steps": random.randint(1, 8),
            }
            keys = {key: value for key, value in keys.items() if random.random() < 0.8}
            made = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **keys)
            numbers = [
                made.per_device_train_batch_size,
                made.gradient_accumulation_steps,
                made.average_tokens_across_devices,
            ]
            cases.append({"keys": keys, "result": numbers})
    return cases


def trl(_: Path, random: Random) -> Cases:
    import tempfile
    import warnings

    from trl import GRPOConfig

    cases: Cases = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(120):
            world = random.choice((1, 2, 4, 8))
            keys: dict[str, Any] = {
                "per_device_train_batch_size": random.choice((1, 2, 4, 8)),
                "gradient_accumulation_steps": random.choice((1, 2, 4)),
                "num_generations": random.choice((1, 2, 4, 8, 8)),
            }
            if random.random() < 0.3:
                keys["steps_per_generation"] = keys["gradient_accumulation_steps"] * random.choice((1, 2))
            if random.random() < 0.3:
                keys["generation_batch_size"] = (
                    keys["per_device_train_batch_size"] * world * random.choice((1, 2, 3, 4))
                )
            Config = type("Config", (GRPOConfig,), {"world_size": property(lambda self, world=world: world)})

            def numbers(keys: dict[str, Any] = keys, Config: Any = Config) -> Any:
                made = Config(output_dir=folder, use_cpu=True, report_to="none", bf16=False, **keys)
                return [made.generation_batch_size, made.steps_per_generation, made.num_generations]

            cases.append({"keys": keys, "world": world} | outcome(numbers))
    return cases


def tunix(folder: Path, random: Random) -> Cases:
    """The accumulation of MaxText's trainer for reinforcement learning; its mini batch is one update."""
    rl = folder / "tunix" / "rl"
    rules = lifted(rl / "utils.py", ["is_positive_integer", "check_divisibility"])
    check = lifted(rl / "rl_cluster.py", ["RLTrainingConfig.__post_init__"], {"rl_utils": SimpleNamespace(**rules)})
    cases: Cases = []
    for _ in range(60):
        batch, micro = random.randint(1, 64), random.choice((None, 1, 2, 3, 4, 8, 16, 64))
        config = SimpleNamespace(mini_batch_size=batch, train_micro_batch_size=micro, gradient_accumulation_steps=None)
        config.rollout_micro_batch_size = config.compute_logps_micro_batch_size = None

        def steps(config: Any = config) -> Any:
            check["RLTrainingConfig.__post_init__"](config)
            return config.gradient_accumulation_steps

        cases.append({"batch": batch, "micro": micro} | outcome(steps))
    return cases


def names_in(folder: Path, pattern: str) -> set[str]:
    """Every word and every flag in the files of a package."""
    texts = [path.read_text("utf-8", "replace") for path in folder.glob(pattern)]
    flags = {flag.replace("-", "_") for text in texts for flag in re.findall(r"--([\w-]+)", text)}
    return flags | {word for text in texts for word in re.findall(r"\w+", text)}


KEYS = {
    "verl": ("verl", "verl/trainer/config/_generated_ppo_*trainer.yaml"),
    "torchtitan": ("torchtitan", "torchtitan/**/*.py"),
    "llamafactory": ("llama-factory", "llamafactory/**/*.py"),
    "nanotron": ("nanotron", "nanotron/config/*.py"),
    "openrlhf": ("openrlhf", "**/cli/train_ppo_ray.py"),
    "megatron-bridge": ("megatron-bridge", "megatron/bridge/training/*.py"),
    "axolotl": ("axolotl", "axolotl/utils/**/*.py"),
    "llm-foundry": ("composer", "llmfoundry/**/*.py"),
    "megatron-core-0.19": ("megatron-lm", "megatron/**/*.py"),
    "levanter": ("levanter", "levanter/**/*.py"),
    "ai2-olmo-core": ("olmo-core", "olmo_core/**/*.py"),
}


def keys_of(package: str) -> Callable[[Path, Random], Cases]:
    """Which of the dialect's keys the package knows: its YAML files have them, or each part is a word in its Python files."""

    def make(folder: Path, _: Random) -> Cases:
        from batchwright.dialects import flatten, framework

        dialect, pattern = framework(KEYS[package][0]), KEYS[package][1]
        keys = sorted({*dialect.keys, *dialect.special, *dialect.checked, *dialect.steps})
        if pattern.endswith(".yaml"):
            import yaml

            trees = [yaml.safe_load(path.read_text("utf-8")) for path in folder.glob(pattern)]
            paths = {key for tree in trees for key in flatten(tree)}
            return [{"key": key, "known": key in paths} for key in keys]
        words = names_in(folder, pattern)
        return [{"key": key, "known": all(part in words for part in key.split("."))} for key in keys]

    return make


ORACLES: dict[str, tuple[str, Callable[[Path, Random], Cases]]] = {
    "megatron_linear": ("megatron-core-0.16", megatron_linear),
    "megatron_constant": ("megatron-core-0.19", megatron_constant),
    "megatron_steps": ("megatron-core-0.19", megatron_steps),
    "deepspeed": ("deepspeed", deepspeed),
    "levanter": ("levanter", levanter),
    "olmo_core": ("ai2-olmo-core", olmo),
    "llm_foundry": ("llm-foundry", foundry),
    "axolotl": ("axolotl", axolotl),
    "verl": ("verl", verl),
    "torchtitan": ("torchtitan", torchtitan),
    "llama_factory": ("llamafactory", llama_factory),
    "transformers": ("transformers", transformers),
    "trl": ("trl", trl),
    "tunix": ("google-tunix", tunix),
    **{f"keys_{re.sub('[-.]', '_', name)}": (name, keys_of(name)) for name in KEYS},
}


def main(argv: list[str]) -> int:
    folder, check = Path(argv[0]), "--check" in argv
    logging.disable(logging.CRITICAL)
    different = 0
    for name, (package, make) in ORACLES.items():
        version = VERSIONS.get(package)
        if version is None:
            from importlib.metadata import version as installed

            version = installed(package)
        record = {"package": package, "version": version, "made_by": "tests/dialects/oracles.py"}
        record["cases"] = json.loads(json.dumps(make(folder / package, Random(name))))
        path = VECTORS / f"{name}.json"
        head = json.dumps({k: v for k, v in record.items() if k != "cases"})[:-1]
        text = head + ', "cases": [\n' + ",\n".join(json.dumps(case) for case in record["cases"]) + "\n]}\n"
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif json.loads(path.read_text(encoding="utf-8"))["cases"] != record["cases"]:
            different += 1
            print(f"{name}: {package} {version} does not give the recorded vectors")
        print(f"{name}: {len(record['cases'])} cases of {package} {version}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
