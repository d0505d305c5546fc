"""For all tests: Ctrl-C works as at a terminal, properties have no deadline, and long files start first."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from tests.examples import many

# gcsfs reads this when it is imported, by whichever test comes first: the emulator of GCS does not speak gRPC.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "patient", deadline=None, max_examples=many(100)
)  # the rest as in the loaded profile: `ci` in CI
settings.load_profile("patient")

# The files that take longest, longest first: a worker that got one of them last would keep the others waiting.
LONGEST = (
    "launch/slurm/test_slurm_loop.py",
    "launch/test_torture.py",
    "torture/test_torture.py",
    "torture/test_chaos.py",
    "torture/test_disks.py",
    "launch/slurm/test_slurm_chain.py",
    "launch/slurm/test_slurm_engine.py",
    "adapters/test_run.py",
    "adapters/test_huggingface.py",
    "probe/test_real.py",
    "probe/test_programs.py",
    "launch/test_supervisor.py",
    "runtime/loop/test_loop.py",
    "runtime/step/test_accumulate.py",
    "probe/test_server.py",
    "estimate/test_families.py",
    "runtime/check/test_check.py",
    "device/test_ranks.py",
    "device/test_probe.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((index for index, name in enumerate(LONGEST) if path.endswith(f"tests/{name}")), len(LONGEST))

    items.sort(key=place)
