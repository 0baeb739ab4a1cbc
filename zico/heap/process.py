"""This process's heap record, where the compiled hooks find it.

Imported before ``zico.heap.hooks``: the hooks' machine code refers to the symbol registered here.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np

from zico.heap.layout import HEAP

SYMBOL = "zico_process_heap"

HEAP_RECORD = np.zeros(1, HEAP)
"""Never freed, never moved: hooks may run until the last instruction of the process."""

llvmlite.binding.add_symbol(SYMBOL, HEAP_RECORD.ctypes.data)
