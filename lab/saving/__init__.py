"""Planners that save memory: published ones, their bounds and their judges."""
