"""A small GPT on bytes, trained on the source files of the Python standard library that runs it.

    batchwright run examples/bytegpt/bytegpt.py:task --arg size=small …       the task, for every verb that takes one
    python examples/bytegpt/train.py                                          a complete training run, in one process
    torchrun --standalone --nproc-per-node 2 examples/bytegpt/train.py        the same on two ranks

Documents are files, cut at `sequence_length`. They differ in length, so the loss is a sum over all bytes, and its weight is
the number of bytes. The task downloads and writes nothing.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from batchwright.runtime import Task

END = 256  # begins and ends a document; 0 to 255 are the bytes
VOCABULARY = 264  # a multiple of 8
IGNORED = -100
# width, layers, heads: 0.1, 0.9 and 5 million parameters
SIZES = {"tiny": (48, 2, 2), "small": (128, 4, 4), "medium": (256, 6, 8)}


def source_files() -> list[Path]:
    """The .py files of the standard library, without its tests, in an order that does not depend on their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts)]
    return sorted(files, key=lambda p: sha256(p.relative_to(root).as_posix().encode()).digest())


class Documents:
    """Sample i is a document or a part of one: END, up to `sequence_length` bytes, and END at the end of the file."""

    def __init__(self, sequence_length: int, files: int | None = None) -> None:
        self.sequence_length = sequence_length
        texts = [p.read_bytes() for p in source_files()[:files]]
        texts = [text for text in texts if text.strip()]
        self.data = np.frombuffer(b"".join(texts), np.uint8)
        self.starts: list[tuple[int, int, bool]] = []
        offset = 0
        for text in texts:
            for at in range(0, len(text), sequence_length):
                end = min(at + sequence_length, len(text))
                self.starts.append((offset + at, offset + end, end == len(text)))
            offset += len(text)
        self.fingerprint = sha256(self.data).hexdigest()[:32] + f" cut at {sequence_length}"

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Tensor:
        start, end, last = self.starts[i]
        text = torch.from_numpy(self.data[start:end].astype(np.int64))
        return torch.cat([torch.tensor([END]), text, torch.tensor([END] if last else [], dtype=torch.int64)])

    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that knows only the byte frequencies; a trained model must be better."""
        shares = np.bincount(self.data, minlength=256) / len(self.data)
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum())


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, padded to the longest sample; padding is not a target."""
    length = max(len(sample) for sample in samples) - 1
    inputs = torch.zeros(len(samples), length, dtype=torch.int64)
    targets = torch.full((len(samples), length), IGNORED)
    for row, sample in enumerate(samples):
        inputs[row, : len(sample) - 1] = sample[:-1]
        targets[row, : len(sample) - 1] = sample[1:]
    return inputs, targets


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    width: int
    layers: int
    heads: int
    sequence_length: int


class ByteGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.sequence_length + 1, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # GPT-2's rule: residual branches start small
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * shape.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all bytes, and the number of bytes."""
    inputs, targets = batch
    logits = model(inputs)
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def task(size: str = "small", sequence_length: int = 128, learning_rate: float = 3e-3, files: int = 0) -> Task:
    """The task; `files` limits the number of source files (0: all)."""
    sequence_length, files = int(sequence_length), int(files)
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}.")
    shape = Shape(*SIZES[size], sequence_length)
    return Task(
        model=lambda: ByteGPT(shape),
        dataset=Documents(sequence_length, files or None),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=float(learning_rate), betas=(0.9, 0.95)),
        collate=collate,
        example_batch=lambda n: collate([torch.full((sequence_length + 1,), 65) for _ in range(n)]),
    )
