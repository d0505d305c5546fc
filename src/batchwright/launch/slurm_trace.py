"""Ask the ranks of one node for their stacks, as a step beside theirs: python -P -m batchwright.launch.slurm_trace DIR PER_NODE

A signal to the whole step would end the ranks' parents, too, and with them the ranks before they have written a line.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from .engine import rank_logs


def main(words: list[str]) -> int:
    """SIGABRT for the ranks that srun put on this node, in blocks; faulthandler leaves a stack in each one's log."""
    node, per_node = int(os.environ.get("SLURM_NODEID", "0")), int(words[1])
    for rank in rank_logs(Path(words[0])):
        if rank.rank // per_node == node and rank.pid and rank.state not in (None, "Z"):
            for number in (signal.SIGABRT, signal.SIGCONT):  # one that was stopped leaves its stack when it goes on
                try:
                    os.kill(rank.pid, number)
                except ProcessLookupError:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
