"""Sorting digits as a task for `train_rl`: what samples responses, what makes advantages of rewards, and the loss."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from grpo import ADVANTAGES, FILLER, Policy, Sampled, Shape, Sorting, policy_loss, rewards, sample, uniforms
from torch import Tensor, nn

from batchwright.runtime import Prompts, RLTask


def task(
    digits: int = 8,
    size: int = 20_000,
    held_out: int = 512,
    seed: int = 0,
    learning_rate: float = 1e-3,
    advantage: str = "grpo",
    weighting: str = "tokens",
    permute: bool = False,
) -> RLTask:
    """Sorting digits. With `permute` the advantages of a group go to the wrong responses: nothing can be learned."""
    data = Sorting(digits, size, held_out, seed)

    def prepare(group: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        given = ADVANTAGES[advantage](torch.tensor([[response["reward"] for response in group]]))[0].tolist()
        if permute:
            random.Random(f"{seed} {group[0]['prompt_position']}").shuffle(given)
        return [{**response, "advantage": a} for response, a in zip(group, given, strict=True)]

    def loss(policy: nn.Module, batch: tuple[Tensor, Sampled, Tensor]) -> tuple[Tensor, Tensor]:
        return policy_loss(policy, *batch, weighting=weighting)

    return RLTask(
        model=lambda: Policy(Shape(positions=2 * (digits + 1))),
        dataset=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        collate=collate,
        rollout=rollout,
        prepare=prepare,
    )


def rollout(policy: Policy, prompts: Prompts, generations: int) -> list[list[dict[str, Any]]]:
    """Responses to each prompt of a rollout micro batch, with their rewards."""
    asked = torch.stack(prompts.data).repeat_interleave(generations, 0)
    sampled = sample(policy, asked, uniforms(prompts.seed, list(prompts.positions), generations, asked.shape[1]))
    columns = (asked.numpy(), sampled.tokens.numpy(), sampled.log_probabilities.numpy())
    numbers = (sampled.lengths.tolist(), rewards(asked, sampled.tokens).tolist())
    rows = [
        {"prompt": prompt, "tokens": tokens[:length], "log_probabilities": logps[:length], "reward": reward}
        for prompt, tokens, logps, length, reward in zip(*columns, *numbers, strict=True)
    ]
    return [rows[i : i + generations] for i in range(0, len(rows), generations)]


def collate(responses: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Sampled, Tensor]:
    """A training micro batch: prompts, responses filled up to the longest possible one, advantages."""
    prompts = torch.tensor(np.stack([r["prompt"] for r in responses]))
    tokens, logps = torch.full(prompts.shape, FILLER), torch.zeros(prompts.shape)
    lengths = torch.tensor([len(r["tokens"]) for r in responses])
    for row, response in enumerate(responses):
        tokens[row, : lengths[row]] = torch.from_numpy(response["tokens"])
        logps[row, : lengths[row]] = torch.from_numpy(response["log_probabilities"])
    return prompts, Sampled(tokens, lengths, logps), torch.tensor([r["advantage"] for r in responses])
