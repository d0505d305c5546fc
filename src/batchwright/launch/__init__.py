"""Engines that start launches, and the supervisor that walks a ramp with them; its state is a run directory."""
