"""Published systems that page, as cases of Zico's pager: the parts that are on, how far it looks ahead, and its tiers.

* ``deepum``: what is expected comes, what is not leaves, and what nothing lives in is dropped, 32
  executions ahead. Source: J. Jung, J. Kim, J. Lee, "DeepUM: Tensor Migration and Prefetching in
  Unified Memory" (ASPLOS 2023).
* ``sentinel``: the same for an interval whose length trials choose. Temporaries lie in pages of
  their own, which never leave. Source: J. Ren et al., "Sentinel: Efficient Tensor Migration and
  Allocation on Heterogeneous Memory Systems for Deep Learning" (HPCA 2021), sections IV and V.
* ``oc-dnn``: what the next layer uses comes, what the last one used leaves, and nothing is dropped.
  Source: A. A. Awan et al., "OC-DNN: Exploiting Advanced Unified Memory Capabilities in CUDA 9 and
  Volta GPUs for Out-of-Core DNN Training" (HiPC 2018).
* ``dragon``: pages of files, on demand. Source: P. Markthub et al., "DRAGON: Breaking GPU Memory
  Capacity Limits with Direct NVM Access" (SC 2018).

Known limitations
    * An execution is an allocation of a job, where DeepUM has a kernel, and OC-DNN and Sentinel have
      layers. What they know of the network is learned here.
    * Sentinel puts long-lived tensors of like access counts on a page. The heap sees allocations and
      no accesses, so it tells three classes by their lifetimes: temporaries, what lives within an
      iteration, and what lives on. Its temporaries live for a 64th of the iteration at most, where
      Sentinel's live for a layer.
    * Files are read and written past the page cache, which is DRAGON's middle tier. A memory tier
      before the file stands for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.paging.layout import APART, DEEPUM, DEGREE, PREEVICT, PREFETCH, TUNE

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYER = 6
"""Allocations of 64 KiB or more in a layer, one way. ResNet-110 has 464 in its forward pass, 4.2 for each of its 110
layers, and 868 in its backward pass, 7.9 for each."""

PAGERS: Mapping[str, Mapping[str, Any]] = {
    "deepum": {"flags": DEEPUM, "degree": DEGREE},
    "sentinel": {"flags": DEEPUM | TUNE | APART, "degree": DEGREE},
    "oc-dnn": {"flags": PREFETCH | PREEVICT, "degree": LAYER},
    "dragon": {"flags": 0, "tier": "file"},
}
"""Parameters of ``zico.paging.pager.PagedMemory``, and as ``tier`` where pages go unless the user says."""
