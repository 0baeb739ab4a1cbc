"""Decisions about an iteration's tensors, made before they exist. Pure: nothing here knows a device."""
