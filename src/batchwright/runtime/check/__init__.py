"""Does a split change the gradient? `check` runs one batch of a task whole and split, and names the causes."""

from .causes import Finding as Finding
from .causes import SplitResult as SplitResult
from .compare import CheckReport as CheckReport
from .compare import check as check
from .compare import default_sizes as default_sizes
