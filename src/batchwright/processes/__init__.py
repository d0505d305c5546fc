"""Processes that run the user's code: started and ended safely, why each ended, `FILE.py:function`. Standard library only."""
