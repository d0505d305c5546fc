"""The step and the loader against a hand-written loop, Accelerate, Lightning and Hugging Face Trainer, in one process.

    pip install --target /tmp/peers --no-deps accelerate transformers lightning ...     # never into the project's .venv
    PYTHONPATH=/tmp/peers python benchmarks/bench_step.py [--rounds 9] [--steps 8] [--pairs 150] [--inside 20]
    python benchmarks/bench_step.py --only-inside                                        # the loops of the adapters' pages alone

Same model, same samples in the same order, same micro batch size and accumulation, plain SGD. All contenders use the same
optimizer, which records the CPU time of the process at each `step()`, so building trainers does not count. Contenders run
in turn, round after round; a ratio is the median over rounds with a distribution-free 95% interval. The last column is the
error of the gradient at the first `optimizer.step()`, relative to the batch in one piece in fp64: lengths are lognormal,
so a mean of micro batches is wrong. Peers that cannot be imported are listed as not installed.

`--inside` compares the loops of docs/accelerate.md and docs/lightning.md (Fabric), which use the pieces of batchwright inside the
framework, with the framework's own accumulation: interleaved pairs, and the framework against itself as the noise floor. It
fails if the median of the pairs of Accelerate is above 1.05, whatever that floor is. Fabric's own accumulation is the loop by
hand, against which the small model takes a tenth more (docs/benchmarks.md), so it is shown without a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from bench_order import ratio, seconds, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from batchwright.core.ramp.rules import Constant
from batchwright.runtime import GlobalOrder, Loader, StepSampler, accumulate

VOCABULARY, IGNORE = 256, -100
MICRO, ACCUMULATION = 4, 8
SIZES = {"small (1 layer, width 32)": (1, 32), "larger (4 layers, width 128)": (4, 128)}


class Sentences(Dataset[Tensor]):
    """Token sequences of lognormal length, 4 to 96 (CV about 0.7)."""

    def __init__(self, samples: int) -> None:
        lengths = random.Random(0)
        draw = torch.Generator().manual_seed(0)
        sizes = [min(96, max(4, round(lengths.lognormvariate(3.0, 0.8)))) for _ in range(samples)]
        self.rows = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": nn.utils.rnn.pad_sequence([r[:-1] for r in rows], batch_first=True),
        "labels": nn.utils.rnn.pad_sequence([r[1:] for r in rows], batch_first=True, padding_value=IGNORE),
    }


class Model(nn.Module):
    """A small transformer without a causal mask; `forward` has Hugging Face's signature, so all contenders can train it."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=input_ids == 0)
        return self.head(x)

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        loss = F.cross_entropy(
            self.logits(input_ids).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE
        )
        return {"loss": loss / ((labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch)}


class MeanModel(Model):
    """The same model with a forward that takes no count: Trainer then averages micro batches."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(input_ids, labels)


class TimedSGD(torch.optim.SGD):
    """SGD that records the CPU time of the process at every step, and the gradient of the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        self.times: list[float] = []
        self.gradient: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)  # Lightning runs the micro step inside the closure
        if self.gradient is None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.gradient = torch.cat([g.detach().flatten() for g in grads]).double()
        self.times.append(time.process_time())
        return found


class PairedSGD(TimedSGD):
    """SGD that runs the same step of another loop after each step, and records the time of both."""

    def __init__(self, params: Any, other: Iterator[None]) -> None:
        super().__init__(params)
        self.other, self.pairs, self.last = other, list[tuple[float, float]](), time.process_time()

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        now = time.process_time()
        next(self.other)
        self.pairs.append((now - self.last, time.process_time() - now))
        self.last = time.process_time()
        return found


def ours(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    batch = MICRO * ACCUMULATION
    sampler = StepSampler(Constant(batch).compile().until(len(data)), micro_batch_size=MICRO)
    loader = Loader(data, GlobalOrder(len(data), shuffle=False), sampler, collate=collate)
    for step in accumulate(loader, model):
        for micro in step:
            ids, labels = micro.data["input_ids"], micro.data["labels"]
            loss = F.cross_entropy(
                model.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE
            )
            step.backward(loss, (labels != IGNORE).sum())
        step.apply(optimizer)


def by_hand(model: Model, data: Sentences, optimizer: torch.optim.Optimizer) -> None:
    for _ in steps_by_hand(model, data, optimizer):
        pass


def steps_by_hand(model: Model, data: Sentences, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for i, batch in enumerate(DataLoader(data, MICRO, collate_fn=collate)):
        (model(**batch)["loss"] / ACCUMULATION).backward()
        if (i + 1) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield


def accelerate(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    accelerator = import_module("accelerate").Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    loader = DataLoader(data, MICRO, collate_fn=collate)
    wrapped, stepper, batches = accelerator.prepare(model, optimizer, loader)
    for batch in batches:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch)["loss"])
            stepper.step()
            stepper.zero_grad()


def pieces(model: Any, data: Sentences, optimizer: Any) -> None:
    """The loop of docs/accelerate.md and, of Fabric, of docs/lightning.md, on a model and an optimizer of the framework."""
    sampler = StepSampler(Constant(MICRO * ACCUMULATION).compile().until(len(data)), micro_batch_size=MICRO)
    loader = Loader(data, GlobalOrder(len(data), shuffle=False), sampler, collate=collate)
    for step in accumulate(loader, model):
        for micro in step:
            total = model(**micro.data, num_items_in_batch=1)["loss"]  # divided by 1: a sum
            step.backward(total, (micro.data["labels"] != IGNORE).sum())
        step.apply(optimizer)


def in_accelerate(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    wrapped, stepper = import_module("accelerate").Accelerator(cpu=True).prepare(model, optimizer)
    pieces(wrapped, data, stepper)


def fabric(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    runner = import_module("lightning").Fabric(accelerator="cpu", devices=1)
    wrapped, stepper = runner.setup(model, optimizer)
    for i, batch in enumerate(runner.setup_dataloaders(DataLoader(data, MICRO, collate_fn=collate))):
        last = (i + 1) % ACCUMULATION == 0
        with runner.no_backward_sync(wrapped, enabled=not last):
            runner.backward(wrapped(**batch)["loss"] / ACCUMULATION)
        if last:
            stepper.step()
            stepper.zero_grad()


def in_fabric(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    wrapped, stepper = import_module("lightning").Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    pieces(wrapped, data, stepper)


def lightning(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    L = import_module("lightning")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATION,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, MICRO, collate_fn=collate))


def trainer(model: Model, data: Sentences, optimizer: TimedSGD) -> None:
    hf = import_module("transformers")

    class InOrder(hf.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(data)

    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATION,
            num_train_epochs=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        InOrder(model, arguments, train_dataset=data, data_collator=collate, optimizers=(optimizer, rate)).train()


CONTENDERS: dict[str, tuple[Callable[..., None], type[Model], str | None]] = {  # function, model, needed package
    "batchwright": (ours, Model, None),
    "by hand: mean / accumulation": (by_hand, Model, None),
    "Accelerate `accumulate()`": (accelerate, Model, "accelerate.Accelerator"),
    "Lightning `accumulate_grad_batches`": (lightning, Model, "lightning.Trainer"),
    "HF Trainer, loss takes the count": (trainer, Model, "transformers.Trainer"),
    "HF Trainer, loss without it": (trainer, MeanModel, "transformers.Trainer"),
}


# A framework alone, and with our pieces.
INSIDE = {"Accelerate": (accelerate, in_accelerate), "Fabric": (fabric, in_fabric)}
LIMIT = 1.05  # with our pieces / alone


def exact(kind: type[Model], size: tuple[int, int], data: Sentences) -> Tensor:
    """The gradient of the first step's samples in one piece, in fp64."""
    model = built(kind, size).double()
    model(**collate(data.rows[: MICRO * ACCUMULATION]))["loss"].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def built(kind: type[Model], size: tuple[int, int]) -> Model:
    torch.manual_seed(0)
    return kind(*size).train()


def run(name: str, size: tuple[int, int], data: Sentences) -> tuple[float, Tensor]:
    """CPU seconds per step without the first, and the gradient of the first step."""
    function, kind, _ = CONTENDERS[name]
    return timed(function, kind, size, data)


def timed(
    function: Callable[..., None], kind: type[Model], size: tuple[int, int], data: Sentences
) -> tuple[float, Tensor]:
    model = built(kind, size)
    optimizer = TimedSGD(model.parameters())
    with quiet():
        function(model, data, optimizer)
    times = optimizer.times
    assert optimizer.gradient is not None and len(times) == len(data) // (MICRO * ACCUMULATION), (function, len(times))
    return (times[-1] - times[0]) / (len(times) - 1), optimizer.gradient


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            yield


def installed() -> dict[str, str]:
    """Contenders that can run, with the version of their package; prints which cannot."""
    found: dict[str, str] = {}
    for name, (_, _, package) in CONTENDERS.items():
        try:
            with quiet():
                module = None if package is None else import_module(package.partition(".")[0])
                if module is not None:
                    getattr(module, str(package).partition(".")[2])  # transformers imports its Trainer here
                found[name] = "" if module is None else f" {module.__version__}"
        except ImportError as error:
            print(f"{name}: not installed ({error}); see this script's first lines for PYTHONPATH.")
    return found


def step_by_step(pairs: int) -> None:
    """Ours against the loop by hand, alternating after every step: much less noise than with whole rounds."""
    rows = []
    for title, size in SIZES.items():
        data, theirs, mine = Sentences((pairs + 5) * MICRO * ACCUMULATION), built(Model, size), built(Model, size)
        other = steps_by_hand(theirs, data, torch.optim.SGD(theirs.parameters(), lr=1e-3))
        optimizer = PairedSGD(mine.parameters(), other)
        ours(mine, data, optimizer)
        one, two = ([pair[i] for pair in optimizer.pairs[5:]] for i in (0, 1))  # without the first ones
        rows.append([title, seconds(one), seconds(two), ratio(two, one)])
    head = ["model", "batchwright", "by hand", "times the loop by hand"]
    table(f"Step by step in one process, {pairs} pairs: CPU time", head, rows)


def inside(pairs: int, steps: int) -> list[str]:
    """Our pieces in a loop of a framework against its own accumulation, and that against itself; what is too slow."""
    data, rows, slow = Sentences((steps + 1) * MICRO * ACCUMULATION), list[list[str]](), list[str]()
    for framework, (alone, with_ours) in INSIDE.items():
        for title, size in SIZES.items():
            turns = [[timed(one, Model, size, data)[0] for one in (alone, with_ours, alone)] for _ in range(pairs + 1)]
            first, mine, again = (list(times) for times in zip(*turns[1:], strict=True))  # the first turn warms up
            rows.append([framework, title, seconds(first), ratio(first, mine), ratio(first, again)])
            found = median(b / a for a, b in zip(first, mine, strict=True))
            if found > LIMIT and framework != "Fabric":
                slow.append(f"{framework}, {title}: {found:.3f} is above {LIMIT}")
    head = ["framework", "model", "alone, per step", "with our pieces / alone", "alone / alone"]
    table(f"Inside a loop of the framework, {pairs} interleaved pairs: CPU time", head, rows)
    return slow


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps measured per round")
    parser.add_argument("--pairs", type=int, default=150, help="steps compared one by one with the loop by hand")
    parser.add_argument("--inside", type=int, default=20, help="pairs inside a loop of Accelerate, and of Fabric")
    parser.add_argument("--only-inside", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for logger in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if not given.only_inside:
        step_by_step(given.pairs)
        compare(given)
    sys.exit("\n".join(inside(given.inside, given.steps)) or 0)


def compare(given: argparse.Namespace) -> None:
    """All contenders, in turn."""
    data = Sentences((given.steps + 1) * MICRO * ACCUMULATION)
    names = installed()
    for title, size in SIZES.items():
        times: dict[str, list[float]] = {name: [] for name in names}
        errors: dict[str, float] = {}
        for turn in range(given.rounds + 1):
            for name in names:
                taken, gradient = run(name, size, data)
                if turn:  # the first round includes imports and cold caches
                    times[name].append(taken)
                else:
                    reference = exact(CONTENDERS[name][1], size, data)
                    errors[name] = float((gradient - reference).norm() / reference.norm())
        base = times["batchwright"]
        rows = [
            [
                name + names[name],
                seconds(times[name]),
                ratio(base, times[name]) if name != "batchwright" else "1",
                f"{errors[name]:.1e}",
            ]
            for name in names
        ]
        head = ["contender", "CPU time per step", "times batchwright's", "gradient error"]
        table(f"{title}: micro batch {MICRO} × {ACCUMULATION} accumulation, lognormal lengths", head, rows)


if __name__ == "__main__":
    main()
