"""Adapters for the trainers of other frameworks: exact accumulation, ramps and resume without leaving the framework.

    huggingface   `exact(Trainer)`: transformers.Trainer, TRL's SFTTrainer and subclasses of them
    lightning     `exact(MyModule)` and `Steps`: Lightning's Trainer

One item of the loader is one optimizer step: the list of this rank's micro batches. The framework's own accumulation stays
at 1, so its steps, logging, saving and schedules all count optimizer steps. `adapter.py` is the part that all adapters share.
"""
