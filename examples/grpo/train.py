"""Teach a tiny transformer to sort digits by GRPO, from random weights: `python examples/grpo/train.py --help`.

    python examples/grpo/train.py --dir /tmp/sort8                        eight digits, sampling in a second process
    python examples/grpo/train.py --dir /tmp/sort4 --digits 4 --rounds 250
    torchrun --standalone --nproc-per-node 2 examples/grpo/train.py --dir /tmp/ranks --rollout ranks      one rank trains

Start it again with the same directory to continue after a stop or a crash.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from grpo import ADVANTAGES, WEIGHTINGS, Policy, sample, wanted
from task import task

import batchwright
from batchwright import SampleSchedule
from batchwright.runtime import RLSettings, audit, train_rl


def exact_match(policy: Policy, prompts: torch.Tensor) -> float:
    """The part of prompts that the likeliest response answers without any mistake."""
    return (sample(policy, prompts, None).tokens == wanted(prompts)).all(dim=1).float().mean().item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/grpo", help="the run directory (%(default)s)")
    parser.add_argument("--digits", type=int, default=8, help="digits of a prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="rounds of sampling and training (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a round (%(default)s)")
    parser.add_argument("--generations", type=int, default=16, help="responses to each prompt (%(default)s)")
    parser.add_argument("--rollout-micro-prompts", type=int, default=8, help="prompts sampled at once (%(default)s)")
    parser.add_argument("--train-micro-responses", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="falls to 0 in the last round (%(default)s)")
    parser.add_argument("--advantage", choices=ADVANTAGES, default="grpo", help="(%(default)s)")
    parser.add_argument("--weighting", choices=WEIGHTINGS, default="tokens", help="what counts equally (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=512, help="prompts that are only evaluated (%(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=50, help="rounds (%(default)s)")
    parser.add_argument("--rollout", choices=["thread", "process", "ranks"], default="process", help="(%(default)s)")
    parser.add_argument("--no-overlap", action="store_true", help="train after a round was sampled: the same updates")
    parser.add_argument("--permute-advantages", action="store_true", help="control: advantages of the wrong responses")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    budget = given.rounds * given.prompts
    mine = task(
        given.digits,
        size=min(budget, 10**given.digits - given.held_out),
        held_out=given.held_out,
        seed=given.seed,
        learning_rate=given.learning_rate,
        advantage=given.advantage,
        weighting=given.weighting,
        permute=given.permute_advantages,
    )
    plan = batchwright.rl(
        prompts=given.prompts,
        generations=given.generations,
        rollout_micro_prompts=given.rollout_micro_prompts,
        train_micro_responses=given.train_micro_responses,
    )
    first = int(os.environ.get("RANK", 0)) == 0
    began, rewards, times, matches = time.monotonic(), [], [], []

    def on_round(done, policy) -> None:
        rewards.append(done.reward)
        times.append((done.seconds, done.rollout_seconds, done.train_seconds, done.wait_seconds))
        if (done.round + 1) % given.evaluate_every == 0 or done.round + 1 == given.rounds:
            matches.append(exact_match(policy, mine.dataset.held_out))
            print(
                f"round {done.round + 1:4d}  reward {done.reward:.3f}  held-out exact match {matches[-1]:.3f}  "
                f"{time.monotonic() - began:5.1f} s",
                flush=True,
            )

    if first:
        print(f"{len(mine.dataset):,} prompts of {given.digits} digits, {given.held_out} held out", flush=True)
    status = train_rl(
        mine,
        plan,
        RLSettings(
            directory=given.dir,
            seed=given.seed,
            threads=1,
            max_norm=1.0,
            learning_rate=SampleSchedule(
                1.0, budget, warmup_samples=min(10 * given.prompts, budget // 10), decay="linear"
            ),
            checkpoint_every=100 * given.prompts,
            rollout=given.rollout,
            rollout_workers=int(os.environ.get("WORLD_SIZE", 2)) - 1 if given.rollout == "ranks" else 1,
            overlap=not given.no_overlap,
            progress=False,
        ),
        rounds=given.rounds,
        on_round=on_round,
    )
    if first and matches:
        found = audit(Path(given.dir))
        seconds, rollout, train, wait = (sum(column) for column in zip(*times, strict=True))
        print(f"\n| {'reward, first and last round':35} | {rewards[0]:.3f}, {rewards[-1]:.3f} |")
        print(f"| {'held-out exact match':35} | {matches[-1]:.3f} |")
        print(f"| {'responses per second':35} | {len(times) * plan.responses_per_update / seconds:,.0f} |")
        print(f"| {'seconds: all, rollout, train, wait':35} | {seconds:.1f}, {rollout:.1f}, {train:.1f}, {wait:.1f} |")
        cpu = os.times()
        print(
            f"| {'CPU seconds: this process, children':35} | {cpu.user + cpu.system:.1f}, "
            f"{cpu.children_user + cpu.children_system:.1f} |"
        )
        print(f"| {'ledger':35} | {found.summary()} |")
    return status.exit_code


if __name__ == "__main__":
    sys.exit(main())
