"""Signals to the supervisor: the first requests a checkpoint and a stop, a later Ctrl-C an immediate stop."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_APART = 1.0  # seconds: a closing terminal, or a launcher, sends several signals at once
Pause = Callable[[float, str], bool]  # waits for these seconds, for this reason; False if a stop was requested


def pause(seconds: float, reason: str) -> bool:
    """The pause of a process that nothing asks to stop."""
    time.sleep(seconds)
    return True


class Interrupts:
    """Counts the requests to stop while entered; `sleep` ends early on a request and when a child ends."""

    def __init__(self) -> None:
        self.stop_requests = 0
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in (*_STOPPING, signal.SIGCHLD):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run outlives its terminal
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            for end in self._pipe:
                os.close(end)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if number not in _STOPPING:
            return
        if not self.stop_requests:
            self.stop_requests, self._first = 1, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first > _APART:
            self.stop_requests += 1

    def sleep(self, seconds: float) -> None:
        """Wait at most this long."""
        if self._pipe is None:
            threading.Event().wait(seconds)
            return
        if select.select([self._pipe[0]], [], [], max(0.0, seconds))[0]:
            try:
                while os.read(self._pipe[0], 512):
                    pass
            except BlockingIOError:
                pass
