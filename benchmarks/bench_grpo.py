"""GRPO on the same task, model and batch: TRL's GRPOTrainer against `train_rl` and a loop by hand.

Responses per second of whole updates (sampling, reward, training), one thread per process, and the gradient of one update
on the responses that TRL sampled. Every contender trains a few updates in turn, round after round; the first update of a
turn is not counted. A ratio is the median over rounds of CPU time, theirs / ours, with the least and the most.

`generate()` is transformers': "batchwright, transformers" samples and trains transformers' GPT-2 as TRL does, so that row
compares the two loops. The other rows also compare the example's own model and sampler with transformers'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.grpo import peer, test_trl  # isort: skip  (it puts examples/grpo on the path)

import grpo
import task as example
from transformers import TrainerCallback
from trl import GRPOTrainer

import batchwright
from batchwright.runtime import Prompts, RLSettings, RLTask, train_rl

DIGITS, PROMPTS, GENERATIONS, MICRO_PROMPTS, MICRO_RESPONSES = 8, 32, 16, 8, 128
Times = list[tuple[float, float]]  # CPU and wall seconds at the end of each update


def now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


def first_policy() -> grpo.Policy:
    torch.manual_seed(0)
    return grpo.Policy(grpo.Shape(positions=2 * (DIGITS + 1)))


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: Times = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.times.append(now())


def trl(updates: int) -> Times:
    rows = grpo.Sorting(DIGITS, PROMPTS * updates, 1, 0).rows
    batch = {"prompts": PROMPTS, "generations": GENERATIONS, "micro_responses": MICRO_RESPONSES}
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        trainer = peer.trainer(GRPOTrainer, first_policy(), rows, out, updates=updates, **batch)
        trainer.add_callback(clock)
        trainer.train()
    return clock.times


def by_hand(updates: int) -> Times:
    policy, data, times = first_policy(), grpo.Sorting(DIGITS, PROMPTS * updates, 1, 0), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for update in range(updates):
        positions = list(range(PROMPTS * update, PROMPTS * (update + 1)))
        prompts = torch.stack([data[i] for i in positions]).repeat_interleave(GENERATIONS, 0)
        parts = []
        for at in range(0, PROMPTS, MICRO_PROMPTS):
            chosen = slice(at * GENERATIONS, (at + MICRO_PROMPTS) * GENERATIONS)
            drawn = grpo.uniforms(0, positions[at : at + MICRO_PROMPTS], GENERATIONS, DIGITS + 1)
            parts.append(grpo.sample(policy, prompts[chosen], drawn))
        sampled = grpo.Sampled(*(torch.cat(column) for column in zip(*parts, strict=True)))
        rewards = grpo.rewards(prompts, sampled.tokens).view(PROMPTS, GENERATIONS)
        advantages = grpo.group_relative(rewards).flatten()
        tokens = sampled.lengths.sum()
        for at in range(0, len(prompts), MICRO_RESPONSES):
            chosen = slice(at, at + MICRO_RESPONSES)
            part = grpo.Sampled(*(column[chosen] for column in sampled))
            total, _ = grpo.policy_loss(policy, prompts[chosen], part, advantages[chosen])
            (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
    return times


class Logits(nn.Module):
    """transformers' GPT-2 as the example's loss calls a policy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = peer.gpt2(first_policy())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def generate(policy: Logits, prompts: Prompts, generations: int) -> list[list[dict]]:
    """A rollout by transformers' generate(), as TRL samples."""
    asked = torch.stack(prompts.data).repeat_interleave(generations, 0)
    length = asked.shape[1]
    made = policy.model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        do_sample=True,
        top_k=0,
        max_new_tokens=length,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = torch.full((len(asked), length), grpo.END)
    sampled = made.sequences[:, length:]
    tokens[:, : sampled.shape[1]] = sampled
    logps = torch.zeros(tokens.shape)
    logits = torch.log_softmax(torch.stack(made.logits, dim=1), dim=2)
    logps[:, : sampled.shape[1]] = logits.gather(2, sampled[:, :, None])[:, :, 0]
    ended = tokens == grpo.END
    lengths = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, length)
    tokens[torch.arange(length) >= lengths[:, None]] = grpo.FILLER  # generate() fills with END
    rewards = grpo.rewards(asked, tokens)
    rows = [
        {"prompt": p.numpy(), "tokens": t[:n].numpy(), "log_probabilities": q[:n].numpy(), "reward": float(r)}
        for p, t, q, n, r in zip(asked, tokens, logps, lengths.tolist(), rewards, strict=True)
    ]
    return [rows[i : i + generations] for i in range(0, len(rows), generations)]


def ours(updates: int, transformers: bool = False, **settings) -> Times:
    task = example.task(DIGITS, size=PROMPTS * updates, held_out=1)
    if transformers:
        task = RLTask(
            model=Logits,
            dataset=task.dataset,
            loss=task.loss,
            optimizer=task.optimizer,
            collate=task.collate,
            rollout=generate,
            prepare=task.prepare,
        )
    plan = batchwright.rl(
        prompts=PROMPTS,
        generations=GENERATIONS,
        rollout_micro_prompts=PROMPTS if transformers else MICRO_PROMPTS,  # TRL samples a round at once
        train_micro_responses=MICRO_RESPONSES,
    )
    times: Times = []
    with tempfile.TemporaryDirectory() as out:
        run = RLSettings(directory=out, threads=1, max_norm=1.0, progress=False, **settings)
        train_rl(task, plan, run, rounds=updates, on_round=lambda done, policy: times.append(now()))
    return times


CONTENDERS: dict[str, Callable[[int], Times]] = {
    "batchwright": lambda updates: ours(updates, rollout="thread", overlap=False),
    "a loop by hand": by_hand,
    "batchwright, transformers' model and generate()": lambda updates: ours(
        updates, transformers=True, rollout="thread", overlap=False
    ),
    "TRL GRPOTrainer, transformers' generate()": trl,
    "batchwright, overlapped in two processes": lambda updates: ours(updates, rollout="process"),
}


def gradients() -> None:
    print("\n| TRL's loss type | " + " | ".join(f"`{w}`" for w in grpo.WEIGHTINGS) + " |\n|---|" + "---|" * 3)
    policy = first_policy()
    for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo"):
        with tempfile.TemporaryDirectory() as out:
            micro_batches, reference = test_trl.theirs(peer, policy, out, loss_type)
        errors = [
            test_trl.relative_error(test_trl.mine(peer, policy, micro_batches, weighting, 8), reference)
            for weighting in grpo.WEIGHTINGS
        ]
        print(f"| `{loss_type}` | " + " | ".join(f"{error:.1e}" for error in errors) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=6)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    taken: dict[str, Times] = {name: [] for name in CONTENDERS}
    for round_ in range(given.rounds + 1):
        for name in list(CONTENDERS)[:: 1 if round_ % 2 else -1]:
            times = CONTENDERS[name](given.updates)
            spent = tuple((b - a) / (given.updates - 1) for a, b in zip(times[0], times[-1], strict=True))
            if round_:  # the first round warms up
                taken[name].append(spent)
    responses, base = PROMPTS * GENERATIONS, taken["batchwright"]
    print(f"An update of {PROMPTS} prompts × {GENERATIONS} responses, {given.rounds} interleaved rounds.\n")
    print("| | responses per CPU second | CPU time / batchwright | responses per second | wall time / batchwright |")
    print("|---|---|---|---|---|")
    for name, values in taken.items():
        cells = []
        for kind in (0, 1):
            ratios = sorted(mine[kind] / one[kind] for mine, one in zip(values, base, strict=True))
            cells.append(f"{responses / statistics.median(v[kind] for v in values):,.0f}")
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        if "two processes" in name:  # the other process's CPU time is not in this one's
            cells[:2] = ["", ""]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    gradients()


if __name__ == "__main__":
    main()
