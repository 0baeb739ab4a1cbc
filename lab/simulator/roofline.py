"""Devices by their data sheets, and the least time that an operation can take on one.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model",
CACM 52(4), 2009. An operation of F floating-point operations that moves B bytes takes at least
max(F / peak, B / bandwidth). No efficiency factor is applied: real kernels reach 50 to 90 % of it,
and small ones wait for their launch.
"""

from __future__ import annotations

import dataclasses
import math

from zico.base.errors import ConfigError
from zico.base.units import GIB

_TERA = 1e12
_GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """What a data sheet says of a device. Dense figures (no structured sparsity), boost clock."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    """Bytes per second between the device's memory and its processors."""
    fp32: float
    """Floating-point operations per second in single precision; an addition and a multiplication are two."""
    tf32: float
    """Matrix products of single precision where TF32 is allowed; ``fp32`` where the device has none."""
    fp16: float
    """Matrix products in half precision that accumulate in single precision."""
    source: str
    is_cuda: bool = True

    def duration_ns(self, flops: float, moved_bytes: float, itemsize: int = 4, *, tf32: bool = False) -> int:
        """Return the least nanoseconds for an operation, at least 1.

        Args:
            flops: Floating-point operations.
            moved_bytes: Bytes read and written, each tensor once.
            itemsize: Bytes of one number in the computation.
            tf32: Whether single precision may be TF32.
        """
        peak = self.fp16 if itemsize <= 2 else self.tf32 if tf32 else self.fp32  # noqa: PLR2004 - bytes of a half
        return max(1, math.ceil(max(flops / peak, moved_bytes / self.bandwidth) * 1e9))


def _model(  # noqa: PLR0913, PLR0917 - a row of a table
    name: str, title: str, gib: int, gb_s: float, fp32: float, tf32: float, fp16: float, source: str
) -> DeviceModel:
    return DeviceModel(
        name, title, gib * GIB, gb_s * _GIGA, fp32 * _TERA, tf32 * _TERA, fp16 * _TERA, source, name != "cpu-2core"
    )


_NVIDIA = "nvidia.com/en-us/data-center"
_V100 = "images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_PASCAL = "nvidia.com/en-us/geforce/products/10series/geforce-gtx-1080-ti: 3584 cores, 1582 MHz; half runs as single"
_MAXWELL = "nvidia.com/en-us/geforce/graphics-cards/geforce-gtx-titan-x: 3072 cores, 1075 MHz; half runs as single"
_P100 = "images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf; no tensor cores"
_TURING = "NVIDIA Turing GPU Architecture, WP-09183-001, reference clocks"
_T4 = "nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_ADA = "NVIDIA Ada GPU Architecture, V2.02"
_A100 = "nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_HALVED = "tensor figures halved: stated with sparsity"
_CORES = "2 x 2.5 GHz x two AVX2 multiply-adds of 8 lanes; one channel of DDR4-3200"

# Name, title, GiB, GB/s, then TFLOP/s: FP32, TF32, FP16 with FP32 accumulate.
DEVICES = {
    model.name: model
    for model in (
        _model("v100-16gb", "NVIDIA V100 SXM2 16 GB", 16, 900, 15.7, 15.7, 125, _V100),
        _model("v100-32gb", "NVIDIA V100 SXM2 32 GB", 32, 900, 15.7, 15.7, 125, _V100),
        _model("titan-x", "NVIDIA GeForce GTX Titan X (Maxwell)", 12, 336.5, 6.6, 6.6, 6.6, _MAXWELL),
        _model("p100-16gb", "NVIDIA Tesla P100 PCIe 16 GB", 16, 732, 9.3, 9.3, 9.3, _P100),
        _model("gtx-1080-ti", "NVIDIA GeForce GTX 1080 Ti", 11, 484, 11.34, 11.34, 11.34, _PASCAL),
        _model("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", 11, 616, 13.4, 13.4, 53.8, _TURING),
        _model("t4", "NVIDIA T4", 16, 320, 8.1, 8.1, 65, _T4),
        _model("l4", "NVIDIA L4", 24, 300, 30.3, 60, 121, f"{_NVIDIA}/l4, {_HALVED}"),
        _model("rtx-4090", "NVIDIA GeForce RTX 4090", 24, 1008, 82.6, 82.6, 165.2, _ADA),
        _model("a100-40gb", "NVIDIA A100 SXM 40 GB", 40, 1555, 19.5, 156, 312, _A100),
        _model("a100-80gb", "NVIDIA A100 SXM 80 GB", 80, 2039, 19.5, 156, 312, _A100),
        _model("h100-sxm", "NVIDIA H100 SXM 80 GB", 80, 3350, 67, 494.5, 989.5, f"{_NVIDIA}/h100, {_HALVED}"),
        _model("h200", "NVIDIA H200 SXM 141 GB", 141, 4800, 67, 494.5, 989.5, f"{_NVIDIA}/h200, {_HALVED}"),
        _model("cpu-2core", "two cores of a server processor", 8, 25.6, 0.16, 0.16, 0.16, _CORES),
    )
}


def device_model(name: str) -> DeviceModel:
    """Return the model of that name.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ConfigError(f"{name!r} is not a device model: give one of {', '.join(DEVICES)}") from None
