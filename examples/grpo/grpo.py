"""GRPO on a task whose reward a program computes: a tiny transformer learns to sort digits, from random weights.

    prompt "31420987="   wanted "01234789."   reward: the part of the wanted characters that stand in their places

A response ends with "." or after as many characters as the wanted one has, so responses differ in length.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, log_softmax, scaled_dot_product_attention

CHARACTERS = "0123456789=."
END = CHARACTERS.index(".")
FILLER = CHARACTERS.index("=")  # after the end of a response; never wanted, so it earns nothing
WEIGHTINGS = ("tokens", "responses", "constant")


# The task


class Sorting:
    """`size` different rows of digits, and `held_out` more that are not among them; prompt i is its token ids."""

    def __init__(self, digits: int, size: int, held_out: int, seed: int) -> None:
        if size < 1:
            raise ValueError(
                f"{size} prompts: there are {10**digits} rows of {digits} digits, and {held_out} are held out. Hold out at most "
                f"{10**digits - 1}, or take more digits."
            )
        if size + held_out > 10**digits:
            raise ValueError(
                f"{size} prompts + {held_out} held out = {size + held_out}, but there are only {10**digits} rows of "
                f"{digits} digits. At most {10**digits - held_out} prompts."
            )
        numbers = random.Random(seed).sample(range(10**digits), size + held_out)  # without replacement
        rows = [encode(f"{number:0{digits}d}=") for number in numbers]
        self.rows, self.held_out = rows[:size], torch.stack(rows[size:])
        self.fingerprint = f"{size} rows of {digits} digits, seed {seed}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def encode(text: str) -> Tensor:
    return torch.tensor([CHARACTERS.index(c) for c in text])


def decode(tokens: Tensor) -> str:
    return "".join(CHARACTERS[t] for t in tokens.tolist())


def wanted(prompts: Tensor) -> Tensor:
    """The right responses to a batch of prompts: the digits sorted, then END."""
    digits = prompts[:, :-1].sort(dim=1).values
    return torch.cat([digits, torch.full((len(digits), 1), END)], dim=1)


def rewards(prompts: Tensor, tokens: Tensor) -> Tensor:
    """The part of the wanted characters that stand in their places; 1 is an exact match."""
    return (tokens == wanted(prompts)).float().mean(dim=1)


# The model: GPT-2's arithmetic, so that its weights can be copied from and to transformers' GPT-2


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    positions: int
    width: int = 64
    layers: int = 2
    heads: int = 4


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """`cache` (2, batch, heads, positions, width of a head) has keys and values up to `start`, and gets those of x."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, start : start + length], cache[1, :, :, start : start + length] = k, v
            k, v = cache[:, :, :, : start + length]
        attended = scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(len(CHARACTERS), shape.width)
        self.place = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, len(CHARACTERS), bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # GPT-2's rule: residual branches start small
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, start: int = 0) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(start, start + tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None, start)
        return self.head(self.norm(x))


# Sampling


class Sampled(NamedTuple):
    """A batch of sampled responses."""

    tokens: Tensor  # FILLER after the end
    lengths: Tensor  # with END, where the response has one
    log_probabilities: Tensor  # of each token under the policy that sampled it; 0 after the end


def uniforms(seed: int, positions: list[int], generations: int, length: int) -> Tensor:
    """One number in [0, 1) per token of prompts × generations.

    The row of generation g of the prompt at position p depends on (seed, p, g) only: not on the other prompts of the
    batch, and not on how many generations there are.
    """
    rows = [
        np.random.Generator(np.random.Philox(key=[seed % 2**64, p])).random((generations, length), np.float32)
        for p in positions
    ]
    return torch.from_numpy(np.concatenate(rows))


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, uniform: Tensor | None) -> Sampled:
    """Responses to a batch of prompts, by inverse transform sampling; the likeliest tokens if `uniform` is None."""
    count, length = prompts.shape
    head = policy.shape.width // policy.shape.heads
    caches = [torch.empty(2, count, policy.shape.heads, 2 * length, head) for _ in policy.blocks]
    tokens, logps = torch.full((count, length), FILLER), torch.zeros(count, length)
    alive, lengths = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    logits = policy(prompts, caches)[:, -1]
    for at in range(length):
        logp = log_softmax(logits, dim=1)
        if uniform is None:
            token = logp.argmax(dim=1)
        else:
            cumulated = logp.exp().cumsum(dim=1)
            drawn = uniform[:, at, None] * cumulated[:, -1:]
            token = torch.searchsorted(cumulated, drawn, right=True).clamp(max=len(CHARACTERS) - 1)[:, 0]
        token = torch.where(alive, token, FILLER)
        tokens[:, at] = token
        logps[:, at] = torch.where(alive, logp.gather(1, token[:, None])[:, 0], 0.0)
        lengths += alive
        alive = alive & (token != END)
        if at + 1 < length:
            logits = policy(token[:, None], caches, length + at)[:, -1]
    return Sampled(tokens, lengths, logps)


# Advantages: what the reward of a response is compared with


def group_relative(rewards: Tensor, epsilon: float = 1e-4) -> Tensor:
    """GRPO: (prompts, generations) rewards minus the mean of their group, divided by its standard deviation.

    A group whose rewards are equal teaches nothing: its advantages are 0.

    >>> group_relative(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), epsilon=0.0).nan_to_num()
    tensor([[-0.7071,  0.7071],
            [ 0.0000,  0.0000]])
    """
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + epsilon)


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO: each of the (prompts, generations) rewards minus the mean of the others of its group.

    >>> leave_one_out(torch.tensor([[0.0, 0.5, 1.0]]))
    tensor([[-0.7500,  0.0000,  0.7500]])
    """
    n = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * n / (n - 1)


ADVANTAGES = {"grpo": group_relative, "rloo": leave_one_out}


# The loss


def policy_loss(
    policy: nn.Module,
    prompts: Tensor,
    sampled: Sampled,
    advantages: Tensor,
    weighting: str = "tokens",
    clip: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """The sum of the clipped policy losses of a micro batch, and its weight.

    tokens: all tokens of the update count equally. responses: all responses do, a token of a short response counts more.
    constant: tokens count equally, and the divisor is the longest possible response: a long update is a large one.
    """
    count, length = sampled.tokens.shape
    logits = policy(torch.cat([prompts, sampled.tokens[:, :-1]], dim=1))[:, prompts.shape[1] - 1 :]
    logp = log_softmax(logits, dim=2).gather(2, sampled.tokens[:, :, None])[:, :, 0]
    ratio = (logp - sampled.log_probabilities).exp()
    advantage = advantages[:, None]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    mask = torch.arange(length) < sampled.lengths[:, None]
    losses = losses.masked_fill(~mask, 0.0)
    if weighting == "tokens":
        return losses.sum(), mask.sum()
    if weighting == "responses":
        return (losses.sum(dim=1) / sampled.lengths).sum(), torch.tensor(count)
    return losses.sum(), torch.tensor(count * length)
