"""`python -m batchwright.runtime.loop SPEC.json`: one training process, alone or under torchrun."""

from .train import run_process

run_process()
