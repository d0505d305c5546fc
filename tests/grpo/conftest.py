"""`peer.py` imports TRL, which takes seconds: it is left out of the search for doctests."""

collect_ignore = ["peer.py"]
