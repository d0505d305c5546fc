"""With this folder and the project on PYTHONPATH, every Python process has the simulated device, also one that is started by
batchwright."""

from tests.device.sim.patches import install

install()
