"""A supervisor in its own process, which tests kill: python supervise.py RUN_DIR."""

import sys

from batchwright.launch.directory import RunDirectory
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm.engine import SlurmSupervisor

if __name__ == "__main__":
    directory = RunDirectory(sys.argv[1])
    state = SlurmSupervisor(directory, directory.plan(), LineDisplay(sys.stdout, every=0.0)).run()
    sys.exit(0 if state == "complete" else 5)
