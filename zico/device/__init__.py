"""Devices: the virtual-memory operations of one device, in our words. The only door to a device."""
