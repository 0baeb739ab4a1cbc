"""What would a cluster gain whose devices share memory under Zico? Simulated, over a public trace's arrivals.

Without ``--trace`` the arrivals are generated, and results are called ``cluster-generated``.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from clusters import policies as placement
from clusters.events import Cluster
from clusters.growth import growth
from clusters.kinds import CARD, MIXES, kinds, regions_of
from clusters.policies import ESTIMATES, MOST_JOBS, policies
from clusters.speeds import MEASURED_PAIR, Memory, Table
from clusters.text import text_of, write_picture
from clusters.workload import CARMA_MEAN_S, generated, like_carma, read_openb, scaled

if TYPE_CHECKING:
    from clusters.kinds import Kind
    from clusters.workload import Arrivals

DEVICES_PER_COPY = 100
LOADS = (0.8, 2.0)
SEEDS = 7
"""Draws of what jobs train, on the fewest devices; one draw on more."""
GENERATED = 5500
SIZES = {
    100: ("slices", "measured", "idle-25", "idle-50", "idle-75"),
    1000: ("slices", "measured", "idle-50"),
    10_000: ("slices",),
}
"""Devices, and the assumptions about processors that are simulated with so many."""
SMALL_DEVICES, SMALL_JOBS, SMALL_SPAN_S, SMALL_DRAWS = 4, 60, 13_767.0, 50
"""Devices and jobs of CARMA's evaluation, and the time in which its first series of jobs comes."""
POLICIES = ("exclusive", "packing", "carma", "zico", "zico-gain")
FEWER = {10_000: (("exclusive", "packing", "carma", "zico"), LOADS[-1:])}
"""Policies and loads that are simulated with so many devices."""


def one(arrivals: Arrivals, devices: int, mix: tuple[Kind, ...], table: Table, name: str, seed: int) -> dict[str, Any]:
    """Run one policy over arrivals; what kinds jobs have depends on the seed alone."""
    random = np.random.default_rng(seed)
    share = np.array([kind.share for kind in mix])
    n = len(arrivals.arrive_s)
    kind = random.choice(len(mix), n, p=share / share.sum())
    estimate = random.choice(ESTIMATES, n)
    began_s, simulated_s = time.process_time(), table.spent_s
    work_s, arrive_s = arrivals.work_s, arrivals.arrive_s
    cluster = Cluster(policies(table)[name], devices, arrive_s=arrive_s, work_s=work_s, kind=kind, estimate=estimate)
    run = cluster.run()
    spent_s = time.process_time() - began_s - (table.spent_s - simulated_s)
    completion_s = run.end_s - arrive_s
    return {
        "jobs": n,
        "makespan_s": float(run.end_s.max() - arrive_s[0]),
        "mean_completion_s": float(completion_s.mean()),
        "median_completion_s": float(np.median(completion_s)),
        "p99_completion_s": float(np.percentile(completion_s, 99)),
        "failures": int(run.failures.sum()),
        "work_per_device_s": float(work_s.sum() / run.device_s),
        "most_sets": run.most_sets,
        "span_s": float(arrive_s[-1] - arrive_s[0]),
        "placement_us": spent_s / n * 1e6,
        "sets": len(table.known) - 1,
        "set_ms": table.spent_s / max(1, len(table.known) - 1) * 1e3,
    }


def rows_of(
    arrivals: Arrivals, sizes: dict[int, tuple[str, ...]], mixes: dict[str, tuple[Kind, ...]], seeds: int
) -> list[dict[str, Any]]:
    """Return a row for each mix, size, assumption, load and policy: medians over the seeds."""
    rows = []
    for mix_name, mix in mixes.items():
        tables: dict[str, Table] = {}
        for devices, assumptions in sizes.items():
            for assumption in assumptions:
                table = tables.setdefault(assumption, Table(Memory(mix), assumption))
                names, loads = FEWER.get(devices, (POLICIES, LOADS))
                for load in loads:
                    common.note(f"{mix_name}, {devices} devices, {assumption}, load {load:g}")
                    copies = max(1, devices // DEVICES_PER_COPY)
                    repeats = seeds if devices <= DEVICES_PER_COPY else 1
                    inputs = [scaled(arrivals, devices, load, copies, seed) for seed in range(repeats)]
                    for name in names:
                        found = [one(each, devices, mix, table, name, seed) for seed, each in enumerate(inputs)]
                        rows.append(
                            {"mix": mix_name, "devices": devices, "assumption": assumption, "load": load}
                            | {"policy": name}
                            | {key: statistics.median(run[key] for run in found) for key in found[0]}
                            | {"makespans_s": [run["makespan_s"] for run in found]}
                        )
    return rows


def small_rows(mix: tuple[Kind, ...], assumptions: tuple[str, ...], draws: int) -> list[dict[str, Any]]:
    """Return, for as few devices and jobs as CARMA's evaluation has, makespans over exclusive's."""
    rows = []
    for assumption in assumptions:
        table = Table(Memory(mix), assumption)
        ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
        for seed in range(draws):
            some = like_carma(SMALL_JOBS, SMALL_SPAN_S, seed)
            found = {name: one(some, SMALL_DEVICES, mix, table, name, seed)["makespan_s"] for name in POLICIES}
            for name in POLICIES:
                ratios[name].append(found[name] / found["exclusive"])
        rows.append({"assumption": assumption} | {name: statistics.median(ratios[name]) for name in POLICIES})
    return rows


def kind_rows(mixes: dict[str, tuple[Kind, ...]]) -> list[dict[str, Any]]:
    """Return what each kind needs."""
    return [
        {"mix": mix, "kind": kind.name, "batch": MIXES[mix][kind.name].batch, "share": kind.share}
        | {"iteration_ms": kind.profile.duration_ns / 1e6, "peak_regions": kind.profile.peak}
        | {"keeps_regions": kind.keeps, "idle": kind.idle}
        for mix, chosen in mixes.items()
        for kind in chosen
    ]


def main() -> None:
    """Simulate, and write the results."""
    parser = common.parser(__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="openb_pod_list_default.csv of alibaba/clusterdata")
    options = parser.parse_args()
    directory = common.output_directory(options)
    arrivals = read_openb(options.trace) if options.trace else generated(200 if options.smoke else GENERATED, 0)
    sizes: dict[int, tuple[str, ...]] = {10: ("slices",)} if options.smoke else SIZES
    mixes = {mix: kinds(mix, 1 if options.smoke else None) for mix in MIXES}
    settings = {
        "source": arrivals.source,
        "card": CARD,
        "regions": regions_of(0),
        "loads": LOADS,
        "most_jobs": MOST_JOBS,
        "sm_activity": placement.SM_ACTIVITY,
        "estimates": ESTIMATES,
        "measured_pair": MEASURED_PAIR,
        "seeds": SEEDS,
        "small_devices": SMALL_DEVICES,
        "small_jobs": SMALL_JOBS,
        "small_span_s": SMALL_SPAN_S,
        "small_load": CARMA_MEAN_S * SMALL_JOBS / SMALL_SPAN_S / SMALL_DEVICES,
    }
    name = "cluster" if options.trace or options.smoke else "cluster-generated"
    result = common.document(name, "What would a cluster gain whose devices share memory under Zico?", settings)
    result["kinds"] = kind_rows(mixes)
    result["rows"] = rows_of(arrivals, sizes, mixes, 1 if options.smoke else SEEDS)
    result["small"] = small_rows(mixes["mixed"], sizes[min(sizes)], 1 if options.smoke else SMALL_DRAWS)
    largest = [
        row
        for row in result["rows"]
        if (row["mix"], row["policy"], row["assumption"], row["load"]) == ("mixed", "zico", "slices", LOADS[-1])
    ]
    result["growth"] = growth(mixes["mixed"], largest)
    common.write(result, text_of(result), directory)
    if directory is not None:
        write_picture(result, directory / f"{name}.png")


if __name__ == "__main__":
    main()
