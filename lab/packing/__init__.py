"""Planners of addresses, and what compares them."""
