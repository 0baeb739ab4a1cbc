"""A cluster of devices, each with a broker of its own, simulated event by event."""
