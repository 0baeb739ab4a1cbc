"""What the paper of Zico reports, and how each figure was come by.

Source: G. Lim, J. Ahn, W. Xiao, Y. Kwon, M. Jeon, "Zico: Efficient GPU memory sharing for
concurrent DNN training", USENIX ATC 2021. ``fig``: read off a plot, about 5 % off; ``text`` and
``table``: printed; ``calc``: by us from these.
"""

from __future__ import annotations

import dataclasses

REGION_BYTES = 64 << 20
"""Section 5.2."""
TEMPORAL = "time slices of equal length, without the cost of switching"
"""What the paper compares with (section 7): half of the device's time for each of two jobs."""


@dataclasses.dataclass(frozen=True)
class Identical:
    """Two copies of one model on one card: figures 5 and 6."""

    key: str
    """What the pairs of figure 8 call it."""
    title: str
    script: str
    function: str
    arguments: tuple[tuple[str, int | str], ...]
    """Besides the batch, where it is not the zoo's."""
    card: str
    batches: tuple[int, ...]
    """The axis of figure 5."""
    first_over: int
    """Figure 6: the first batch at which two jobs' peaks exceed the card."""
    aggregate: float
    """Figure 6 [fig]: two jobs' peaks at the largest batch over the card."""
    samples_per_s: tuple[float, float, float]
    """Figure 5 [fig]: at the largest batch; Zico, Temporal, MPS."""
    mean_gain: float | None = None
    """Section 7.1 [text]: over Temporal, mean over batches."""

    @property
    def gain(self) -> float:
        """Return Zico over Temporal at the largest batch [calc]."""
        return self.samples_per_s[0] / self.samples_per_s[1]


def _range(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1, step))


_TI, _V100 = "rtx-2080-ti", "v100-32gb"
# The length is not published: the longest multiple of 128 with which the paper's batch 40 fits a
# V100 alone.
_BERT = (("length", 384), ("optimizer", "SGD"))
IDENTICAL = {
    model.key: model
    for model in (
        Identical(
            *("NN", "NASNet", "nasnet", "nasnet_mobile", (), _TI, _range(20, 140, 20)),
            *(80, 1.68, (340, 288, 35), 0.35),
        ),
        Identical(
            *("RN", "ResNet-110", "resnet", "resnet110", (), _TI, _range(100, 800, 100)),
            *(500, 1.65, (2650, 2370, 250)),
        ),
        Identical(
            *("R50", "ResNet-50", "resnet", "resnet50", (), _V100, _range(60, 200, 20)),
            *(140, 1.32, (359, 349, 25)),
        ),
        Identical(
            *("GT", "GNMT", "gnmt", "gnmt", (), _TI, _range(200, 1000, 100)), *(700, 1.57, (2920, 2370, 300), 0.37)
        ),
        Identical(*("RH", "RHN", "rhn", "rhn", (), _TI, _range(20, 60, 10)), *(20, 1.68, (116, 105, 13))),
        Identical(
            *("BT", "BERT", "transformer", "bert_base", _BERT, _V100, _range(5, 40, 5)), *(25, 1.49, (54, 51, 5))
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models on the RTX 2080 Ti: a group of bars in figure 8."""

    first: str
    first_percent: int
    """What it takes of the card alone, in percent."""
    second: str
    second_percent: int
    zico: tuple[float, float]
    """[fig] Throughput over Temporal's."""
    mps: tuple[float, float]

    @property
    def name(self) -> str:
        """Return what the figure calls it."""
        return f"{self.first}{self.first_percent}+{self.second}{self.second_percent}"


PAIRS = (
    Pair("RH", 90, "GT", 60, (1.10, 1.52), (0.18, 0.41)),
    Pair("RH", 90, "GT", 35, (1.59, 1.48), (0.23, 0.48)),
    Pair("NN", 80, "GT", 45, (1.54, 1.24), (0.17, 0.17)),
    Pair("NN", 60, "GT", 50, (1.54, 1.59), (0.26, 0.33)),
    Pair("NN", 30, "GT", 90, (0.95, 1.89), (0.34, 0.51)),
    Pair("BT", 80, "GT", 40, (1.16, 1.48), (0.26, 0.24)),
    Pair("BT", 60, "GT", 50, (0.97, 1.46), (0.22, 0.27)),
    Pair("BT", 45, "GT", 90, (1.03, 1.53), (0.16, 0.27)),
    Pair("NN", 95, "RN", 30, (1.33, 1.04), (0.19, 0.17)),
    Pair("NN", 70, "RN", 60, (1.03, 1.26), (0.15, 0.27)),
    Pair("NN", 45, "RN", 80, (1.13, 1.20), (0.25, 0.12)),
)
PAIR_GAINS = {("RH", "GT"): 0.42, ("NN", "GT"): 0.46, ("BT", "GT"): 0.27, ("NN", "RN"): 0.15}
"""Section 7.2 [text]: mean over Temporal of the pairs of these two."""
PAIR_MPS = {("RH", "GT"): 5.1, ("NN", "GT"): 8.3, ("BT", "GT"): 6.0, ("NN", "RN"): 6.5}
"""Section 7.2 [text]: the most over MPS."""


@dataclasses.dataclass(frozen=True)
class BudgetChange:
    """Two NASNets whose budget falls and rises again: figure 10, on what must be the V100."""

    card: str = _V100
    shares: tuple[float, ...] = (0.7, 0.5, 0.7)
    alone_gb: float = 13.0
    """[fig]"""
    gaps_ms: tuple[float, ...] = (0.0, 140.0, 0.0)
    """[text] Between the iterations of each job."""
    total_gb: tuple[tuple[float, float], ...] = ((18.0, 19.0), (12.0, 14.0), (18.0, 19.0))
    """[fig] Most in use; the last period is not read off."""


BUDGET_CHANGE = BudgetChange()


@dataclasses.dataclass(frozen=True)
class OverTime:
    """Two jobs whose memory figure 7 or 9 draws over time."""

    figure: int
    title: str
    jobs: tuple[tuple[str, float], ...]
    """Each one's model, and what it takes of the card alone."""
    card: str
    waits: str
    """[fig]"""


def _twice(key: str, waits: str) -> OverTime:
    """Return two copies at the largest batch of figure 6."""
    model = IDENTICAL[key]
    return OverTime(7, f"two {model.title}", 2 * ((key, model.aggregate / 2),), model.card, waits)


# Figure 9 draws NASNet beside ResNet-110. Which of figure 8's three pairs of them it is, we did not note: here the one
# whose iterations differ most.
OVER_TIME = (
    _twice("RN", "about 0"),
    _twice("BT", "a little in each iteration"),
    OverTime(9, "NASNet and ResNet-110", (("NN", 0.95), ("RN", 0.30)), _TI, "-"),
)

TRACKING = {
    "event per kernel": (0.78, 0.91, 0.97, 0.44, 0.94, 0.97),
    "8 MB": (1.00, 1.00, 1.00, 0.89, 0.99, 0.99),
    "256 MB": (1.00, 1.00, 1.00, 0.97, 0.99, 1.00),
}
"""Table 1: throughput over that without tracking, in the order of ``IDENTICAL``."""
REGIONS = {
    "tensors": (0.94, 0.99, 0.98, 0.90, 0.96, 0.94),
    "512 KB": (0.94, 0.99, 1.00, 0.97, 0.99, 0.99),
}
"""Table 2: throughput over that with regions of 64 MB, in the order of ``IDENTICAL``."""
