"""Other people's processes: none outlives ours, how each ended, whose traceback it is. Standard library only."""
