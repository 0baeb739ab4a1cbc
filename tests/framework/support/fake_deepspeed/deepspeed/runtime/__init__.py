"""The fake's engine."""
