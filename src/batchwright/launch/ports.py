"""The port at which the ranks of a launch meet."""

from __future__ import annotations

import random
import socket

from batchwright.core.errors import EnvironmentFault

_FIRST = 20_000


def free_port() -> int:
    """A free port below those that Linux gives to connections, so that it stays free until rank 0 binds it."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first_given = int(file.read().split()[0])
    except (OSError, ValueError):
        first_given = 32768
    # Last, 0: any port. Linux may give all ports to connections, or a hundred ports were taken.
    for port in (*random.sample(range(_FIRST, max(first_given, _FIRST + 100)), 100), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # on all addresses: JAX's coordinator listens on all of them
                return probe.getsockname()[1]
            except OSError:
                continue
    raise EnvironmentFault("no port is free for the ranks' rendezvous.")
