"""`python -m batchwright.runtime.loop SPEC.json`: one training process, alone or under torchrun."""

import torch.distributed as dist

from .base import run_process
from .train import main

run_process(main, dist.is_initialized)
