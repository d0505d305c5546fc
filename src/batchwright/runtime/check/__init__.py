"""Does a split change the gradient? `check` runs one batch of a task whole and split, and names every cause."""

from .causes import Finding as Finding
from .compare import CheckReport as CheckReport
from .compare import Split as Split
from .compare import check as check
from .compare import default_sizes as default_sizes
