"""The results of the cluster's simulation in words and in a picture."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import common
from paper.published import REGION_BYTES

from zico.report.picture import COLOURS, DPI, INK

if TYPE_CHECKING:
    from pathlib import Path

CARMA_MAKESPAN = 0.65
"""Of its best policy over exclusive devices, as published: -35 %."""
_SHOWN = ("packing", "carma", "zico", "zico-gain")
_SIZE = 100


def ratio(rows: list[dict[str, Any]], row: dict[str, Any], field: str) -> float:
    """Return a row's figure over that of exclusive devices; of makespans the median over the draws."""
    if field == "makespan_s":
        return statistics.median(ratios(rows, row))
    return float(row[field] / _exclusive(rows, row)[field])


def ratios(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[float]:
    """Return a row's makespans over those of exclusive devices, one for each draw."""
    pairs = zip(row["makespans_s"], _exclusive(rows, row)["makespans_s"], strict=True)
    return [one / other for one, other in pairs]


def _exclusive(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    same = ("mix", "devices", "assumption", "load")
    return next(r for r in rows if r["policy"] == "exclusive" and all(r[key] == row[key] for key in same))


def text_of(result: dict[str, Any]) -> str:
    """Return the result as Markdown, without title and provenance."""
    settings, rows = result["settings"], result["rows"]
    said = (
        f"Simulated. Arrivals and lengths: {settings['source']}. What a job trains is drawn from a mix below. Each "
        f"device is an {settings['card']}; at most {settings['most_jobs']} jobs share one; *load* is the share of the "
        "devices that the jobs would keep busy alone, over the time in which they come. `docs/cluster.md` says what is "
        "assumed.\n"
    )
    small = (
        f"Makespan over exclusive devices, median of draws of {settings['small_jobs']} jobs on "
        f"{settings['small_devices']} devices, which come in {settings['small_span_s'] / 3600:.1f} h; lengths are "
        f"those that CARMA's authors print for its jobs, load {settings['small_load']:.1f}. CARMA's paper: "
        f"{CARMA_MAKESPAN:g}.\n"
    )
    ratios_said = (
        f"Below 1 is better. Of makespans the median, least and most of {settings['seeds']} draws of what jobs train; "
        "one draw where no range stands. *Work*: what a device does in the time in which it has a job, over one job "
        "alone.\n"
    )
    parts = [
        said,
        "## Kinds of jobs\n",
        kinds_table(result["kinds"]),
    ]
    for load in settings["loads"]:
        parts += [
            f"## Load {load:g}: makespan and mean completion over exclusive devices\n",
            ratios_said,
            ratios_table(rows, load),
        ]
    parts += [
        "## As few jobs and devices as in CARMA's paper\n",
        small,
        small_table(result["small"]),
        "## What state and messages grow with\n",
        growth_text(result["growth"]),
    ]
    return "\n".join(parts)


def kinds_table(rows: list[dict[str, Any]]) -> str:
    """Return what each kind needs."""
    gib = REGION_BYTES / 2**30
    header = ("mix, kind", "batch", "share", "iteration ms, at least", "peak GiB", "between iterations GiB", "idle")
    return common.table(
        header,
        (
            (
                *(f"{row['mix']}, {row['kind']}", f"{row['batch']}", f"{row['share']:.0%}"),
                *(f"{row['iteration_ms']:.1f}", f"{row['peak_regions'] * gib:.1f}"),
                *(f"{row['keeps_regions'] * gib:.2f}", f"{row['idle']:.1%}"),
            )
            for row in rows
        ),
    )


def ratios_table(rows: list[dict[str, Any]], load: float) -> str:
    """Return every policy's figures over those of exclusive devices."""
    header = (
        "mix, devices, processors",
        "policy",
        "makespan",
        "least-most",
        "mean completion",
        "median completion",
        "work",
        "out of memory",
    )
    return common.table(
        header,
        (
            (
                *(f"{row['mix']}, {row['devices']:,}, {row['assumption']}", row["policy"]),
                *(f"{ratio(rows, row, 'makespan_s'):.2f}", _range(ratios(rows, row))),
                *(f"{ratio(rows, row, field):.2f}" for field in ("mean_completion_s", "median_completion_s")),
                *(f"{row['work_per_device_s']:.2f}", f"{row['failures']:,.0f}"),
            )
            for row in rows
            if row["load"] == load and row["policy"] != "exclusive"
        ),
    )


def _range(values: list[float]) -> str:
    return "-" if len(values) == 1 else f"{min(values):.2f}-{max(values):.2f}"


def small_table(rows: list[dict[str, Any]]) -> str:
    """Return makespans of a few jobs on a few devices."""
    return common.table(
        ("processors", *_SHOWN), ((row["assumption"], *(f"{row[name]:.2f}" for name in _SHOWN)) for row in rows)
    )


def growth_text(found: dict[str, Any]) -> str:
    """Return bytes and messages."""
    of_a_broker = common.table(
        ("a broker's state", "bytes"),
        (
            ("shared table of a device, all places", f"{found['table_bytes']:,}"),
            ("of it, for a region", f"{found['region_bytes']:,}"),
            (f"of it, for a job (at most {found['most_jobs']})", f"{found['job_bytes']:,}"),
            ("private record of a process", f"{found['member_bytes']:,}"),
            ("a profile, as a placement service would keep one for each kind", f"{found['profile_bytes']:,}"),
        ),
    )
    of_a_service = common.table(
        (
            *("devices", "jobs", "messages of the service a second", "sets looked at, most", "sets simulated"),
            *("ms for a set", "us for a job's placement and end", "boundaries a second, all on their devices"),
        ),
        (
            (
                *(f"{row['devices']:,}", f"{row['jobs']:,.0f}", f"{row['messages_per_s']:.2f}"),
                *(f"{row['most_sets']:,.0f}", f"{row['sets']:,.0f}", f"{row['set_ms']:.0f}"),
                *(f"{row['placement_us']:.0f}", f"{row['device_boundaries_per_s']:,.0f}"),
            )
            for row in found["service"]
        ),
    )
    return (
        f"{of_a_broker}\nAn iteration sends no message over a socket: at most {found['writes_per_boundary']} write to "
        f"an eventfd and {found['wakes_per_boundary']} futex wake, on its own machine. Jobs of this mix end "
        f"{found['boundaries_per_s']:.1f} iterations a second each, alone.\n\n{of_a_service}"
    )


def write_picture(result: dict[str, Any], path: Path) -> None:
    """Draw makespan and mean completion over exclusive devices, by assumption."""
    from matplotlib.figure import Figure

    rows, load = result["rows"], result["settings"]["loads"][-1]
    size = min(row["devices"] for row in rows)
    chosen = [row for row in rows if row["devices"] == size and row["load"] == load]
    mixes = list(dict.fromkeys(row["mix"] for row in chosen))
    assumptions = list(dict.fromkeys(row["assumption"] for row in chosen))
    figure = Figure(figsize=(10, 6), layout="constrained", facecolor="white")
    panels = figure.subplots(2, len(mixes), squeeze=False, sharex=True)
    fields = (("makespan_s", "makespan"), ("mean_completion_s", "mean completion"))
    width = 0.8 / len(_SHOWN)
    for column, mix in enumerate(mixes):
        for panel, (field, said) in zip(panels[:, column], fields, strict=True):
            for number, name in enumerate(_SHOWN):
                of_it = [row for row in chosen if row["mix"] == mix and row["policy"] == name]
                places = [assumptions.index(row["assumption"]) + (number - 1.5) * width for row in of_it]
                panel.bar(places, [ratio(rows, row, field) for row in of_it], width, color=COLOURS[number], label=name)
            panel.axhline(1, color=INK, linewidth=0.8)
            if field == "makespan_s":
                panel.axhline(CARMA_MAKESPAN, color=INK, linewidth=0.8, linestyle=":", label="CARMA, published")
                panel.set_title(f"{mix} jobs, {size} devices, load {load:g}")
            panel.set_xticks(range(len(assumptions)), assumptions)
            panel.set_ylabel(f"{said} over exclusive")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
    print(f"written: {path}")
