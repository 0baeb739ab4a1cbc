"""The record file: a ledger's arrays on disk, whole or not at all."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pathlib import Path


def write_record(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Replace the file at ``path`` by one that holds ``arrays`` (``numpy.load`` reads it, without pickle).

    Raises:
        OSError: It cannot be written; what was at ``path`` before is still there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, values in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, values, allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
