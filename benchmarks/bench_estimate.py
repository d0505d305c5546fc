"""estimate: its error against real peaks, the cost of following a step, and its time by parameters; the time of a plan.

    python benchmarks/bench_estimate.py [--only errors,cost,time,plan] [--rounds 5] [--largest 70]

errors: six models, each run for two steps in a process of its own with a fixed allocator (as `--calibrate` does) at two
micro batches; measured is the peak of resident memory above that of the process after all its imports. Shown are the error
of the estimate alone, of the slope, and of the estimate plus the difference at the smaller micro batch.
cost: CPU time of two fake steps with the tracker, over that of the same two steps without; and that of what an estimate does
instead (one forward and backward, two steps of the optimizer). Interleaved rounds, one process. The script fails if a median
of the first is above 1.5.
time: CPU time to build a Llama on fake tensors and to estimate one micro batch, by its parameters.
plan: CPU time of `plan --model` for a 7B on eight cards of 24 GB, in this process, without the import of torch and
transformers. The script fails above 30 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from batchwright.estimate import worker
from batchwright.estimate.fake import FakeRuns, ReadsAsOne
from batchwright.estimate.records import EstimateRequest
from batchwright.estimate.steps import run_steps
from batchwright.runtime.task import Task

HERE = f"{Path(__file__).resolve()}"
LIMIT, PLAN_SECONDS = 1.5, 30.0
LLAMAS = {  # parameters: width, inner width, layers, heads, groups
    "10M": (192, 512, 8, 4, 4),
    "110M": (768, 2048, 12, 12, 12),
    "1.1B": (2048, 5632, 22, 32, 4),
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "70B": (8192, 28672, 80, 64, 8),
}


def llama(size: str = "", layers: int = 4, experts: int = 0, lora: int = 0, sequence_length: int = 128) -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    width, inner, layers, heads, groups = LLAMAS[size] if size else (256, 704, layers, 4, 4)
    sizes: dict[str, Any] = dict(
        vocab_size=32000 if size else 2048,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=4096,
        use_cache=False,
    )

    def build() -> nn.Module:
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes)) if not experts else None
        if experts:
            model = MixtralForCausalLM(MixtralConfig(num_local_experts=experts, **sizes))
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora, target_modules=["q_proj", "v_proj"]))
        return model.train()

    return Task(
        model=build,
        dataset=torch.zeros(8, sequence_length, dtype=torch.long),
        loss=lambda model, ids: (model(input_ids=ids, labels=ids).loss * ids.numel(), ids.numel()),
        optimizer=lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad]),
    )


def gpt() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=2048, n_positions=128, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    return Task(
        model=lambda: GPT2LMHeadModel(config).train(),
        dataset=torch.zeros(8, 128, dtype=torch.long),
        loss=lambda model, ids: (model(input_ids=ids, labels=ids).loss * ids.numel(), ids.numel()),
        optimizer=lambda ps: torch.optim.AdamW(ps),
    )


def vit() -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, image_size=64, patch_size=8
    )
    return Task(
        model=lambda: ViTForImageClassification(config).train(),
        dataset=torch.zeros(8, 3, 64, 64),
        loss=lambda model, x: (model(pixel_values=x).logits.square().sum(), len(x)),
        optimizer=lambda ps: torch.optim.AdamW(ps),
    )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 64, 128, 128, 256)
        self.layers = nn.Sequential(
            *(
                m
                for a, b in itertools.pairwise(widths)
                for m in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def convolutional() -> Task:
    return Task(
        model=Convolutions,
        dataset=torch.zeros(8, 3, 32, 32),
        loss=lambda model, x: (F.log_softmax(model(x), 1)[:, 0].neg().sum(), len(x)),
        optimizer=lambda ps: torch.optim.AdamW(ps),
    )


MODELS: dict[str, tuple[str, dict[str, Any], int]] = {  # task, arguments, the smaller micro batch
    "GPT": ("gpt", {}, 8),
    "Llama": ("llama", {}, 8),
    "ViT": ("vit", {}, 16),
    "convolutional net": ("convolutional", {}, 16),
    "MoE (8 experts, 2 per token)": ("llama", {"experts": 8}, 8),
    "Llama with LoRA": ("llama", {"lora": 8}, 8),
}


def errors() -> None:
    print("| model | micro batch | estimated MiB | measured MiB | estimate | slope | with one real run |")
    print("|---|---|---|---|---|---|---|")
    for name, (task, args, small) in MODELS.items():
        sizes = (small, 4 * small)
        runs = FakeRuns(EstimateRequest(f"{HERE}:{task}", args))
        estimated = [runs.point(size).peak_memory_bytes for size in sizes]
        real = [
            worker.run("trial", EstimateRequest(f"{HERE}:{task}", args, (size,)), timeout=1800)["measured_bytes"]
            for size in sizes
        ]
        slope = (estimated[1] - estimated[0]) / (real[1] - real[0]) - 1
        corrected = (estimated[1] + real[0] - estimated[0]) / real[1] - 1
        print(
            f"| {name} | {sizes[1]} | {estimated[1] / 2**20:.1f} | {real[1] / 2**20:.1f} | {estimated[1] / real[1] - 1:+.1%} "
            f"| {slope:+.1%} | {corrected:+.1%} |",
            flush=True,
        )


def bare(runs: FakeRuns, batch: Any) -> None:
    assert runs.model is not None
    model, optimizer = runs.model, runs._optimizer(runs.model)
    run_steps(
        lambda b: runs.task.loss_of(model, b),
        model,
        optimizer,
        batch,
        precision="fp32",
        accumulation_steps=1,
        stepping=ReadsAsOne,
    )


def cost(rounds: int) -> None:
    print("| two fake steps | bare, CPU s | followed / bare (median, least to most) | estimate / bare |")
    print("|---|---|---|---|")
    wrong: list[str] = []
    deep: dict[str, tuple[str, dict[str, Any], int]] = {
        "Llama of 16 layers": ("llama", {"layers": 16}, 8),
        "Llama 7B of 32 layers": ("llama", {"size": "7B", "sequence_length": 2048}, 1),
    }
    for name, (task, args, small) in {**MODELS, **deep}.items():
        runs = FakeRuns(EstimateRequest(f"{HERE}:{task}", args))
        batch = runs.batches.of(small)
        ratios: list[float] = []
        whole: list[float] = []
        seconds: list[float] = []
        does = {
            "bare": bare,
            "followed": lambda r, b: r._twice(r.model, b),
            "estimate": lambda r, b: r._follow(r.model, b),
        }
        for round_ in range(-1, rounds):
            times: dict[str, float] = {}
            for which in list(does)[:: 1 if round_ % 2 else -1]:
                with runs.mode:
                    began = time.process_time()
                    does[which](runs, batch)
                    times[which] = time.process_time() - began
            if round_ >= 0:  # the first fills caches
                ratios.append(times["followed"] / times["bare"])
                whole.append(times["estimate"] / times["bare"])
                seconds.append(times["bare"])
        median = statistics.median(ratios)
        if median > LIMIT:
            wrong.append(f"{name}: {median:.2f}")
        print(
            f"| {name} | {statistics.median(seconds):.2f} | {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {statistics.median(whole):.2f} |",
            flush=True,
        )
    if wrong:
        sys.exit(f"following costs more than {LIMIT} times the bare steps: {', '.join(wrong)}")


def duration(largest: float) -> None:
    print("| parameters | build, CPU s | first micro batch, CPU s | second, CPU s |\n|---|---|---|---|")
    for name in LLAMAS:
        if float(name[:-1]) * (1 if name.endswith("B") else 1e-3) > largest:
            continue
        times = [time.process_time()]
        runs = FakeRuns(EstimateRequest(f"{HERE}:llama", {"size": name, "sequence_length": 2048}))
        times.append(time.process_time())
        for size in (1, 2):
            runs.point(size)
            times.append(time.process_time())
        built, first, second = (b - a for a, b in itertools.pairwise(times))
        print(f"| {name} | {built:.1f} | {first:.1f} | {second:.1f} |", flush=True)


def planned() -> None:
    """The first thing that people want: from a 7B and eight cards to a plan."""
    from batchwright.core.batch.request import BatchRequest
    from batchwright.estimate.plan import plan_memory

    width, inner, layers, heads, groups = LLAMAS["7B"]
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }
    batch = BatchRequest(global_batch_size=512, nodes=2, devices_per_node=4, sequence_length=2048)
    worker.run = lambda job, request, timeout: worker._checked(worker.answer(job, request))  # in this process
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        began = time.process_time()
        made, placed = plan_memory(batch, model=folder, device="rtx-4090-24g", precision="bf16")
        took = time.process_time() - began
    way = f"recomputed: {placed.checkpoint_activations}, sharded: {placed.sharded}"
    print("| plan of a 7B, 8 x rtx-4090-24g | micro batch x accumulation | CPU s |\n|---|---|---|")
    print(f"| {way} | {made.micro_batch_size} x {made.accumulation_steps} | {took:.1f} |", flush=True)
    if took > PLAN_SECONDS:
        sys.exit(f"the plan of a 7B took {took:.1f} s of CPU time, and {PLAN_SECONDS:.0f} s are promised")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="errors,cost,time,plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=float, default=70, help="billions of parameters")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = given.only.split(",")
    if "errors" in chosen:
        errors()
    if "time" in chosen:
        print()
        duration(given.largest)
    if "cost" in chosen:
        print()
        cost(given.rounds)
    if "plan" in chosen:
        print()
        planned()


if __name__ == "__main__":
    import transformers  # noqa: F401  its import is no part of any time

    main()
