"""A small GPT on bytes in plain JAX, trained on the source files of the Python standard library that runs it.

    batchwright run examples/jax_gpt/jax_gpt.py:task --nodes 2 --devices-per-node 1 …

Documents are files, cut at `sequence_length` and padded to it, since compiled shapes are fixed. The loss is a sum over all
bytes, and its weight is the number of bytes. The task downloads and writes nothing.
"""

from __future__ import annotations

import math
import sysconfig
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from batchwright.jax import JaxTask

END = 256  # begins and ends a document; 0 to 255 are the bytes
VOCABULARY = 264  # a multiple of 8
WIDTH, LAYERS, HEADS = 48, 2, 2


class Documents:
    """Sample i is a part of a document: END, up to `sequence_length` bytes, padding. `weight` is 1 where a byte is predicted."""

    def __init__(self, sequence_length: int, files: int | None) -> None:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "test", "tests", "__pycache__"}
        found = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts)]
        found.sort(key=lambda p: sha256(p.relative_to(root).as_posix().encode()).digest())
        self.sequence_length = sequence_length
        texts = [path.read_bytes() for path in found[:files]]
        self.parts = [t[at : at + sequence_length] for t in texts for at in range(0, len(t), sequence_length)]
        self.fingerprint = sha256(b"".join(texts)).hexdigest()[:32] + f" cut at {sequence_length}"

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.row(self.parts[i])

    def row(self, text: bytes) -> dict[str, np.ndarray]:
        """Bytes as inputs, targets and weights; no bytes are a row that weighs nothing."""
        targets = np.zeros(self.sequence_length, np.int32)
        targets[: len(text)] = np.frombuffer(text, np.uint8)
        inputs = np.concatenate([[END], targets[:-1]]).astype(np.int32)
        weight = (np.arange(self.sequence_length) < len(text)).astype(np.float32)
        return {"inputs": inputs, "targets": targets, "weight": weight}


def initial(key: jax.Array, sequence_length: int) -> dict:
    """The parameters; residual branches start small, as in GPT-2."""

    def normal(key: jax.Array, *shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(key, shape)

    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))
    small = 0.02 / math.sqrt(2 * LAYERS)
    params = {
        "token": normal(next(keys), VOCABULARY, WIDTH),
        "place": normal(next(keys), sequence_length, WIDTH),
        "blocks": [],
    }
    for _ in range(LAYERS):
        block = {
            "qkv": normal(next(keys), WIDTH, 3 * WIDTH),
            "out": normal(next(keys), WIDTH, WIDTH, std=small),
            "up": normal(next(keys), WIDTH, 4 * WIDTH),
            "down": normal(next(keys), 4 * WIDTH, WIDTH, std=small),
            "norm1": jnp.ones(WIDTH),
            "norm2": jnp.ones(WIDTH),
        }
        params["blocks"].append(block)
    return params | {"norm": jnp.ones(WIDTH)}


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def logits(params: dict, inputs: jax.Array) -> jax.Array:
    """Bytes in, logits of the next byte out."""
    x = params["token"][inputs] + params["place"]
    rows, length, _ = x.shape
    for block in params["blocks"]:
        qkv = (normed(x, block["norm1"]) @ block["qkv"]).reshape(rows, length, 3, HEADS, WIDTH // HEADS)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + attended.reshape(rows, length, WIDTH) @ block["out"]
        x = x + jax.nn.gelu(normed(x, block["norm2"]) @ block["up"]) @ block["down"]
    return normed(x, params["norm"]) @ params["token"].T


def loss(params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of all bytes, and the number of bytes."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["inputs"]), batch["targets"])
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def task(sequence_length: int = 64, learning_rate: float = 3e-3, files: int = 0) -> JaxTask:
    """The task; `files` limits the number of source files (0: all)."""
    dataset = Documents(int(sequence_length), int(files) or None)
    return JaxTask(
        params=lambda key: initial(key, int(sequence_length)),
        loss=loss,
        optimizer=optax.adamw(float(learning_rate)),
        dataset=dataset,
        blank=dataset.row(b""),
    )
