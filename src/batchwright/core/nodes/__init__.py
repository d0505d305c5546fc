"""On how many nodes each stage of a ramp runs, and how long that takes."""
