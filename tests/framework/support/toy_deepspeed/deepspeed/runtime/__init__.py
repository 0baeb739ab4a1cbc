"""The stand-in's engine."""
