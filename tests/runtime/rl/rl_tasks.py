"""A tiny task for the tests of `train_rl`: repeat the prompt's digit. Responses have uneven lengths. And runs of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchwright
from batchwright.runtime import Prompts, RLSettings, RLTask, train_rl

PLAN = {"prompts": 8, "generations": 4, "train_micro_responses": 8, "rollout_micro_prompts": 2}
ROUNDS = 6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(x))


def sample(policy: nn.Module, prompts: Prompts, generations: int) -> list[list[dict[str, Any]]]:
    groups = []
    for digit, position in zip(prompts.data, prompts.positions, strict=True):
        logits = policy(torch.tensor([digit]))
        group = []
        for generation in range(generations):
            generator = torch.Generator().manual_seed(prompts.seed_of(position, generation))
            length = 1 + (position + generation) % 3
            tokens = torch.multinomial(logits.softmax(-1).expand(length, -1), 1, generator=generator)[:, 0]
            reward = float((tokens == digit).double().mean())
            group.append({"digit": digit, "tokens": tokens, "reward": reward})
        groups.append(group)
    return groups


def prepare(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mean = sum(response["reward"] for response in group) / len(group)
    return [{**response, "advantage": response["reward"] - mean} for response in group]


def loss(model: nn.Module, responses: list[dict[str, Any]]) -> tuple[torch.Tensor, float]:
    total, weight = torch.zeros(()), 0
    for one in responses:
        logs = model(torch.full_like(one["tokens"], one["digit"])).log_softmax(-1)
        total = total - one["advantage"] * logs.gather(1, one["tokens"][:, None]).sum()
        weight += len(one["tokens"])
    return total, weight


def task(fault: str = "", at: int = -1, marker: str = "", pause: float = 0.0, shorter: int = 0) -> RLTask:
    """`fault` happens at prompt position `at`: raise, few, hang, exit; with a `marker` file, only until that file exists.
    Rank 1 lacks the last `shorter` prompts."""

    def rollout(policy: nn.Module, prompts: Prompts, generations: int) -> Any:
        time.sleep(pause)
        groups = sample(policy, prompts, generations)
        if at in prompts.positions and not (marker and Path(marker).exists()):
            if marker:
                Path(marker).touch()
            if fault == "raise":
                raise ValueError("no such token")
            if fault == "few":
                groups[prompts.positions.index(at)].pop()
            if fault == "hang":
                time.sleep(600)
            if fault == "exit":
                os.kill(os.getpid(), 9)
        return groups

    return RLTask(
        model=Tiny,
        dataset=[n % 8 for n in range(64 - (shorter if os.environ.get("RANK") == "1" else 0))],
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        collate=list,
        rollout=rollout,
        prepare=prepare,
    )


def run(folder: Path, *, plan: dict[str, Any] | None = None, made: RLTask | None = None, **settings: Any) -> Any:
    """Train in this process; the weights after the last round, and the results of all rounds."""
    rounds: list[Any] = []
    weights: dict[str, torch.Tensor] = {}
    schedule, count = settings.pop("schedule", None), settings.pop("rounds", ROUNDS)

    def keep(result: Any, model: torch.nn.Module) -> None:
        rounds.append(result)
        weights.update({name: value.clone() for name, value in model.state_dict().items()})

    status = train_rl(
        made or task(),
        batchwright.rl(**{**PLAN, **(plan or {})}),
        RLSettings(directory=str(folder), progress=False, **settings),
        rounds=None if schedule else count,
        schedule=schedule,
        on_round=keep,
    )
    assert status.state == "complete"
    return weights, rounds


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
