"""How long does an iteration take when a job has less memory than its peak, and pages?

An example alone in a pool that has all it wants, then with 80, 70, 60 and 50 % of that peak, each
time with pages that come on demand, then with prefetching, pre-eviction, invalidation and all that
is ours besides, and alone again. On one thread the pager has a processor core that no computing
needs, as a GPU has copy engines; with a thread for each core every copied byte costs computing
time. ``--rivals`` pages instead as published systems do, with 60, 40 and 20 % of the peak. The same
seed each time, so the losses must be the same bits. Reported is the median over the
iterations behind the first few, in which the tables are filled. What the machine does besides falls
on all runs, and not on all alike: the two runs alone say how much.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import common
from swap_host import LIMIT_S, RESNET, SHARES, SMOKE_LIMIT_S, Scale, Way, measure

from zico.base.settings import PARTS_VARIABLE
from zico.base.units import format_bytes
from zico.paging.layout import ALL, DEEPUM, PREEVICT, PREFETCH
from zico.planning.saving.registry import PAGERS

QUESTION = "How long does an iteration take when a job has less memory than its peak, and pages?"
RIVALS = "What do the decisions of other systems bring to a real job that pages?"
DEMAND, EVERYTHING = ("page", "0"), ("page", f"{ALL}")
PARTS = {
    "on demand": DEMAND,
    "+ prefetch": ("page", f"{PREFETCH}"),
    "+ pre-evict": ("page", f"{PREFETCH | PREEVICT}"),
    "+ invalidate": ("page", f"{DEEPUM}"),
    "everything": EVERYTHING,
}
"""What ``--save`` says, and what the pager is told."""
SYSTEMS = {"on demand": DEMAND, **{name: (name, "") for name in reversed(PAGERS)}, "everything": EVERYTHING}
"""The same for published systems; on demand from memory is unified memory without hints."""
SYSTEM_SHARES = (0.6, 0.4, 0.2)
SMOKED = ("everything", "sentinel")
EACH = 20
"""Iterations whose faults are told one by one."""
EXAMPLES = {
    "resnet": (RESNET, ("--depth", "14", "--batch", "256")),
    "lm": ("stdlib_lm.py", ("--layers", "2", "--batch", "4")),
}
"""Script, and what makes it small: PyTorch, and Keras on TensorFlow."""


def ways(scale: Scale, parts: dict[str, tuple[str, str]]) -> list[Way]:
    """Return what is run, share by share."""
    return [
        Way(share, {"parts": part}, ("--save", save), ((PARTS_VARIABLE, told),))
        for share in scale.shares
        for part, (save, told) in parts.items()
    ]


def between(one: dict[str, Any]) -> str:
    """Return the shortest and the longest iteration."""
    return f"{one['wall']['min']:.2f} to {one['wall']['max']:.2f}"


def text_of(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    alone_s = statistics.mean(one["wall_s"] for one in result["alone"])
    on_demand = {case["share"]: case["faults"] for case in result["cases"] if case["parts"] == "on demand"}
    demand_s = {case["share"]: case["wall_s"] - alone_s for case in result["cases"] if case["parts"] == "on demand"}
    rows = [
        [name, "-", f"{one['wall_s']:.3f}", between(one), f"{one['wall_s'] / alone_s:.2f}", *["-"] * 5]
        for name, one in zip(("alone", "alone, again"), result["alone"], strict=True)
    ]
    rows += [
        [
            f"{case['share']:.0%}",
            case["parts"],
            f"{case['wall_s']:.3f}",
            between(case),
            f"{case['wall_s'] / alone_s:.2f}",
            f"{(case['wall_s'] - alone_s) / demand_s[case['share']]:.2f}",
            f"{case['faults']:.0f}",
            f"{case['faults'] / on_demand[case['share']] - 1:+.0%}",
            format_bytes(int(case["out_bytes"])),
            format_bytes(int(case["in_bytes"])),
        ]
        for case in result["cases"]
    ]
    header = [
        "share of the peak",
        "parts",
        "s / iteration",
        "least to most",
        "x alone",
        "time lost / on demand's",
        "faults",
        "against on demand",
        "moved out",
        "moved in",
    ]
    peak = format_bytes(result["alone"][0]["peak_bytes"])
    note = f"Peak alone: {peak}. Medians over an iteration. The losses of all runs are the same bits."
    least_s, most_s = sorted(one["wall_s"] for one in result["alone"])
    note += f" The two runs alone differ by {most_s / least_s - 1:.0%}: smaller differences of time say nothing."
    each = [
        f"* {case['share']:.0%}, {case['parts']}: {' '.join(f'{faults:.0f}' for faults in case['faults_each'][:EACH])}"
        for case in result["cases"]
    ]
    told = f"Faults of each iteration from the second on:\n\n{chr(10).join(each)}"
    return f"{note} Threads that compute: {result['threads']}.\n\n{common.table(header, rows)}\n\n{told}"


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--example", choices=EXAMPLES, default="resnet")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: 1)")
    parser.add_argument("--share", type=int, action="append", help="of the peak, in percent (default: 80 to 50)")
    parser.add_argument("--name", help="of the files of results (default: by the example and the ways)")
    parser.add_argument("--rivals", action="store_true", help="page as published systems do, at 60, 40 and 20 %%")
    kinds = {**PARTS, **SYSTEMS}
    parser.add_argument("--part", action="append", choices=kinds, help="what is on, besides nothing (default: each)")
    options = parser.parse_args()
    example, small = EXAMPLES[options.example]
    threads = ("--threads", str(options.threads))
    question, name, kinds = (RIVALS, "page_host-rivals", SYSTEMS) if options.rivals else (QUESTION, "page_host", PARTS)
    if options.smoke:
        scale = Scale(example, (*threads, *small), 5, 3, (0.6,), (), SMOKE_LIMIT_S)
    else:
        shares = tuple(share / 100 for share in options.share or ())
        if options.rivals:
            scale = Scale(example, threads, 32, 20, shares or SYSTEM_SHARES, (), LIMIT_S)
        else:
            scale = Scale(example, threads, 40, 10, shares or SHARES, (), LIMIT_S)
    chosen = options.part or (SMOKED if options.smoke else kinds)
    parts = {part: told for part, told in kinds.items() if told == DEMAND or part in chosen}
    result = common.document(
        options.name or (name if options.example == "resnet" else f"{name}-{options.example}"),
        question,
        dataclasses.asdict(scale) | {"told": parts},
    )
    result["threads"] = options.threads
    result |= measure(scale, ways(scale, parts))
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
