"""Small device kernels, each a NumPy meaning, a Numba kernel and a launch wrapper; installed as ``zico.kernels``.

The host device needs none: its timeline is the CPU's own.
"""
