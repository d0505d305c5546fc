"""What fits, what is fast, and why: trials in processes of their own. Torch is loaded in the trials only."""

from .prober import probe as probe
from .records import Probe as Probe
from .records import Trial as Trial

__all__ = ["Probe", "Trial", "probe"]
