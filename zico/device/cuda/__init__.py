"""The CUDA device, through ``cuda.bindings.driver``: the only package that imports it, and only when it is called."""

from zico.device.cuda.driver import CudaDriver

__all__ = ["CudaDriver"]
