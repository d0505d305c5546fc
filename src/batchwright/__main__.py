"""`batchwright` and `python -m batchwright`."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C while it is still being imported ends it at once, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main

    signal.signal(signal.SIGINT, before)
    main()


if __name__ == "__main__":
    main()
