"""Swapping inside a job: idle tensors go to a tier and are back before they are needed."""
