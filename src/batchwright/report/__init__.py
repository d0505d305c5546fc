"""Plots for a terminal."""
