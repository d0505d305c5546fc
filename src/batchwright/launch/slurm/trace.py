"""Signal the ranks of one node, as a step beside theirs: python -P -m batchwright.launch.slurm.trace DIR PER_NODE SIGNAL

Slurm would signal all processes of the ranks' step, or only the first of each task, by how it tracks them: torchrun takes
a second signal for "now", and a rank's parent that ends takes its rank along, before it has written a line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from batchwright.launch.engine import rank_logs

_TOGETHER_SECONDS = 15.0


def signal_ranks(directory: Path, node: int, per_node: int, number: int) -> None:
    """Signal the ranks that srun put on this node, in blocks. After SIGABRT each one's log has its stack (faulthandler)."""
    for rank in rank_logs(directory):
        if rank.rank // per_node == node and rank.pid and rank.state not in (None, "Z"):
            # One that was stopped leaves its stack when it goes on.
            for one in (number, signal.SIGCONT) if number == signal.SIGABRT else (number,):
                try:
                    os.kill(rank.pid, one)
                except ProcessLookupError:
                    break


def _together(directory: Path, node: int, nodes: int) -> None:
    """Until all nodes are here: the first rank to end takes the others along, with or without their stacks."""
    folder = directory / "tracing"
    folder.mkdir(exist_ok=True)
    (folder / str(node)).touch()
    deadline = time.monotonic() + _TOGETHER_SECONDS
    while len(os.listdir(folder)) < nodes and time.monotonic() < deadline:
        time.sleep(0.01)


def main(words: list[str]) -> int:
    """See the module's text."""
    directory, per_node, number = Path(words[0]), int(words[1]), signal.Signals[words[2]]
    node = int(os.environ.get("SLURM_NODEID", "0"))
    if number == signal.SIGABRT:
        _together(directory, node, int(os.environ.get("SLURM_NNODES", "1")))
    signal_ranks(directory, node, per_node, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
