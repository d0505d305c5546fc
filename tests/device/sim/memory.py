"""The state of the simulated device: its memory, the waits of the host, and copies to the host that are under way."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from types import FrameType

import torch

_OURS, _SIM = f"{os.sep}batchwright{os.sep}", os.path.dirname(__file__)


class Device:
    """One device. `total` is its memory, `limit` what this process may use of it."""

    def __init__(self, total: int = 1 << 30) -> None:
        self.total = self.limit = total
        self.used = self.peak = 0
        self.index = 0
        self.used_once = False
        self.generator = torch.Generator().manual_seed(67280421310721).get_state()
        self.waits: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.failed: Exception | None = None
        self._live: dict[int, list[int]] = {}
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, storage: torch.UntypedStorage) -> int | None:
        """Count a storage; returns a key for `drop`."""
        self.used_once = True
        key, size = storage.data_ptr(), -(-storage.nbytes() // 512) * 512
        if not key:
            return None
        with self.lock:
            if key in self._live:
                self._live[key][0] += 1
                return key
            self.reserve(size)
            self._live[key] = [1, size]
        return key

    def reserve(self, size: int) -> None:
        """Use `size` bytes, or raise what torch raises."""
        if self.used + size > self.limit:
            mib = 2**20
            message = (
                f"CUDA out of memory. Tried to allocate {size / mib:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.total / mib:.2f} MiB of which {(self.total - self.used) / mib:.2f} MiB is free. This process may use "
                f"{self.limit / mib:.2f} MiB, and uses {self.used / mib:.2f} MiB (simulated)."
            )
            self.fail(torch.OutOfMemoryError(message))
        self.used += size
        self.peak = max(self.peak, self.used)

    def fail(self, error: Exception) -> None:
        """Raise an error. In autograd's thread, C++ could not pass it on: it is kept, and raised when backward returns."""
        if not isinstance(threading.current_thread(), threading._DummyThread):
            raise error
        self.failed = self.failed or error

    def drop(self, key: int | None) -> None:
        """One tensor of a storage is gone."""
        with self.lock:
            if entry := self._live.get(key or 0):
                entry[0] -= 1
                if not entry[0]:
                    self.used -= entry[1]
                    del self._live[key or 0]

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is memory of the device."""
        return storage.data_ptr() in self._live

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP2 frees and allocates the storage of a tensor that lives on."""
        with self.lock:
            before = self._live.pop(storage.data_ptr(), [0, 0])
            self.used -= before[1]
            storage.resize_(size)
            if size:
                rounded = -(-size // 512) * 512
                self.reserve(rounded)
                self._live[storage.data_ptr()] = [max(1, before[0]), rounded]

    def wait(self, why: str) -> None:
        """The host waits for the device: everything that is under way arrives."""
        self.waits[f"{why} in {_place(sys._getframe(1))}"] += 1
        with self.lock:
            arriving, self._arriving = self._arriving, []
        for into, data in arriving:
            into.copy_(data)

    def deliver_later(self, into: torch.Tensor, data: torch.Tensor) -> None:
        """A copy to pinned memory: it arrives when the host waits."""
        into.fill_(float("nan") if into.is_floating_point() else True if into.dtype is torch.bool else _largest(into))
        with self.lock:
            self._arriving.append((into, data.clone()))


def _largest(tensor: torch.Tensor) -> int:
    return torch.iinfo(tensor.dtype).max


def _place(frame: FrameType | None) -> str:
    """The line of batchwright that waits, or else of the nearest code that is neither torch's nor this simulation's."""
    other = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if _OURS in name and not name.endswith("device.py"):  # which waits for others
            return f"{name.rpartition(_OURS)[2]}:{frame.f_lineno}"
        if not other and f"{os.sep}torch{os.sep}" not in name and not name.startswith(_SIM):
            other = f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "a thread of torch"


device = Device(int(os.environ.get("SIM_MEMORY", 1 << 30)))
