"""Between the trainer and who samples: messages in a torch.distributed Store, and the weights of the policy.

    trainer                                          worker
    asks.put({"weights": 12})                   ->   take the weights of policy 12
    asks.put({"prompts": [384, 392], "version": 12}) ->   sample, write the file of the piece
    answers.poll()                              <-   answers.put({"prompts": [384, 392], "version": 12, "begin": …})

A store is what torch has for this: a HashStore between threads, a TCPStore between processes of one machine, and under
torchrun the one that it has made for all ranks. Messages are small; responses are files (responses.py).

Weights are one block of bytes. On one machine they are in shared memory, in two slots, so that a new policy can be published
while the one before is being read. Between ranks they are broadcast over torch.distributed, in the background.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# Seconds between two looks at a store: from short, for short micro batches, to long, for an idle machine. torch's own `wait`
# warns on stderr whenever it times out.
_SOONEST, _LATEST = 0.0002, 0.01
# Keys of the store: the trainers stop; a rollout rank got a signal, its number; what rollout ranks need to begin; how it ended.
STOP, SIGNAL, LAUNCH, STATUS = "stop", "signal", "launch", "status"
_LOOKED_AT = 1 << 20  # bytes of the weights in their digest: enough to notice other weights, and fast


class Mailbox:
    """Numbered messages in one direction, as JSON; `shared`: several readers, so the writer deletes them.

    >>> from torch._C._distributed_c10d import HashStore
    >>> store = HashStore(); Mailbox(store, "box").put({"n": 1}); reader = Mailbox(store, "box")
    >>> reader.poll(), reader.poll()
    ({'n': 1}, None)
    """

    def __init__(self, store: Store, name: str, *, shared: bool = False) -> None:
        self._store, self._name, self._shared = store, name, shared
        self._number = self._deleted = 0

    def put(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._store.set(f"{self._name}/{self._number}", json.dumps(message))
        self._number += 1

    def poll(self) -> dict[str, Any] | None:
        """The next message, or None."""
        key = f"{self._name}/{self._number}"
        if not self._store.check([key]):
            return None
        message = json.loads(self._store.get(key))
        self._number += 1
        if not self._shared:
            self._store.delete_key(key)
        return message

    def sweep(self) -> None:
        """Delete all messages that this side has put: every reader has read them."""
        while self._deleted < self._number:
            self._store.delete_key(f"{self._name}/{self._deleted}")
            self._deleted += 1


def pauses(most: float = _LATEST) -> Callable[[], None]:
    """A function that sleeps a little longer at every call."""
    seconds = _SOONEST

    def pause() -> None:
        nonlocal seconds
        time.sleep(seconds)
        seconds = min(2 * seconds, most)

    return pause


class Weights(Protocol):
    """The way that weights take, from the first trainer to every worker."""

    def publish(self, block: Tensor) -> None:
        """The trainer: give this block to every worker, once `ready`. Returns before they have it."""
        ...

    def ready(self) -> bool:
        """The trainer: whether the workers have taken enough for the next `publish` not to wait."""
        ...

    def take(self, worker: int) -> Tensor:
        """A worker: the block after the one that it took last."""
        ...

    def rejoin(self, worker: int) -> None:
        """The trainer: a worker was replaced, and the new one begins with the newest block."""
        ...


class SharedWeights:
    """Two slots in shared memory, and how many blocks each side has had: for a thread and for forked processes.

    >>> shared = SharedWeights(4, workers=1); shared.publish(torch.ones(4, dtype=torch.uint8)); shared.take(0).tolist()
    [1, 1, 1, 1]
    """

    def __init__(self, size: int, workers: int) -> None:
        # Anonymous memory, which a forked process shares. torch's own is a file in /dev/shm, which is small in containers.
        self._slots = torch.frombuffer(mmap.mmap(-1, 2 * max(1, size)), dtype=torch.uint8).view(2, -1)
        counts = torch.frombuffer(mmap.mmap(-1, 8 * (1 + workers)), dtype=torch.int64)
        self._published: Tensor = counts[:1]
        self._taken: Tensor = counts[1:]

    def publish(self, block: Tensor) -> None:
        """Copy the block to the slot that no worker reads."""
        self._slots[int(self._published) % 2, : len(block)].copy_(block)
        self._published += 1

    def ready(self) -> bool:
        """Whether every worker has taken all blocks but the newest."""
        return int(self._published - self._taken.min()) < 2

    def take(self, worker: int) -> Tensor:
        """A copy of the next block."""
        block = self._slots[int(self._taken[worker]) % 2].clone()
        self._taken[worker] += 1
        return block

    def rejoin(self, worker: int) -> None:
        """The next block that this worker takes is the newest."""
        self._taken[worker] = max(0, int(self._published) - 1)


class BroadcastWeights:
    """A broadcast from the first trainer to all rollout ranks, in a group of their own."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group, self._size = group, size
        self._sent: tuple[Tensor, Any] | None = None

    def publish(self, block: Tensor) -> None:
        """Begin the broadcast; nobody may write to the block until it has ended."""
        self._sent = block, cast(Any, dist).broadcast(block, src=0, group=self._group, async_op=True)

    def ready(self) -> bool:
        """Whether the last broadcast has ended; its error, if it failed."""
        if self._sent is None:
            return True
        if not self._sent[1].is_completed():
            return False
        self._sent[1].wait()
        self._sent = None  # the block is as large as the model
        return True

    def take(self, worker: int) -> Tensor:
        """Join the next broadcast."""
        block = torch.empty(self._size, dtype=torch.uint8)
        cast(Any, dist).broadcast(block, src=0, group=self._group)
        return block

    def rejoin(self, worker: int) -> None:
        """A rank is never replaced."""
        raise NotImplementedError


def weights_of(model: nn.Module, *, keep: bool = True) -> Tensor:
    """Parameters and buffers as one new block of bytes in the host's memory; without `keep` an empty one.

    With FSDP2, all trainers must call it together, and only the first needs the block: a whole model.
    """
    block, at = torch.empty(size_of(model) if keep else 0, dtype=torch.uint8), 0
    with torch.no_grad():
        for tensor in _tensors(model):
            whole = cast(Tensor, cast(Any, tensor).full_tensor()) if isinstance(tensor, DTensor) else tensor
            if keep:
                size = whole.numel() * whole.element_size()
                block[at : at + size] = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                at += size
    return block


def digest_of(block: Tensor) -> str:
    """A digest of the weights: of evenly spaced bytes of the block.

    >>> digest_of(torch.zeros(8, dtype=torch.uint8)) == digest_of(torch.ones(8, dtype=torch.uint8))
    False
    """
    step = -(-len(block) // _LOOKED_AT) | 1  # odd, so that it meets every byte of a number
    return sha256(block[::step].contiguous().numpy().tobytes()).hexdigest()[:32]


def size_of(model: nn.Module) -> int:
    """The size of that block."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(model))


def load(policy: nn.Module, block: Tensor) -> None:
    """Set parameters and buffers of a model that is not wrapped."""
    at = 0
    with torch.no_grad():
        for tensor in _tensors(policy):
            size = tensor.numel() * tensor.element_size()
            # The clone is aligned for any type.
            tensor.copy_(block[at : at + size].clone().view(tensor.dtype).view(tensor.shape))
            at += size


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in an order that does not depend on the wrapper."""
    plain: Any = cast(Any, model).module if isinstance(model, DistributedDataParallel) else model
    return [tensor for tensor in plain.state_dict().values() if isinstance(tensor, Tensor)]
