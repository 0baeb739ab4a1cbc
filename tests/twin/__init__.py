"""The CUDA driver's software twin: its functions without a GPU, strict, over the host device's memory. For tests."""
