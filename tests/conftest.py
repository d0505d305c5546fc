"""For all tests: Ctrl-C means what it does at a terminal, and a busy machine is no failure of a property."""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.examples import many

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("patient", deadline=None, max_examples=many(100))  # in all else what was loaded: `ci` in CI
settings.load_profile("patient")
