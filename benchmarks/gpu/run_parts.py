"""What a run on a GPU consists of: parts with goals, and configurations, which are run one by one.

A configuration's command is a script of this folder. The runner calls it with ``--result FILE`` and
``--round N`` behind the script's name, and with ``--go FILE`` where ``waits`` is true. The script
appends a line (``record.append``) under the configuration's part and name as soon as it has the
figures, and may append more under other names before that. In a rehearsal the runner adds the words
of ``rehearsal`` at the end.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import record

Found = dict[str, list[dict[str, Any]]]
"""Name of a configuration of a part -> figures of each round that was done."""
Ask = Callable[..., float | None]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The unit of work: what is run once, or skipped, or goes on in a later lease."""

    part: str
    name: str
    command: tuple[str, ...]
    """A script of this folder and its arguments."""
    expected_s: float
    needs: tuple[str, ...] = ()
    """Configurations that must be done before, as ``part/name``."""
    order: int = 0
    """By value: the least is run first."""
    rounds: int = 1
    """How often it is to be measured; second rounds come behind all first ones."""
    waits: bool = False
    """Whether its command takes ``--go`` and holds nothing of the device before: the runner starts it early."""
    rehearsal: tuple[str, ...] | None = ("--twin",)
    """Nothing: a rehearsal leaves it out, since it runs the same code as another one."""

    @property
    def key(self) -> str:
        """Return what others need it by."""
        return f"{self.part}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure that a part must show."""

    figure: str
    value: Callable[[Found], float | None]
    """Returns nothing where it has not been measured."""
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        """Tell whether a figure is as good as it must be."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclasses.dataclass(frozen=True)
class Part:
    """Configurations that answer one question."""

    name: str
    question: str
    goals: tuple[Goal, ...] = ()


def mean(name: str, *keys: str) -> Callable[[Found], float | None]:
    """Return how to read a figure of one configuration: its mean over the rounds that have it."""

    def read(found: Found) -> float | None:
        values = [value for figures in found.get(name, ()) if (value := _at(figures, keys)) is not None]
        return statistics.fmean(values) if values else None

    return read


def _at(figures: Any, keys: tuple[str, ...]) -> float | None:  # noqa: ANN401 - parsed JSON
    for key in keys:
        figures = figures.get(key) if isinstance(figures, dict) else None
    if isinstance(figures, list):  # of what failed, for example
        return float(len(figures))
    return None if figures is None else float(figures)


# -- what lines say --------------------------------------------------------------------------------


def numbers(found: Found, name: str, *keys: str) -> list[float]:
    """Return a figure of each round and turn of a configuration."""
    lines = [*found.get(name, ()), *found.get(f"{name}{AGAIN}", ())]
    return [value for figures in lines if (value := _at(figures, keys)) is not None]


def rates(found: Found, name: str) -> list[float] | None:
    """Return the mean rate of each job over rounds and turns; a job that never trained has none, which counts 0."""
    lines = [figures["rates"] for figures in (*found.get(name, ()), *found.get(f"{name}{AGAIN}", ()))]
    return [statistics.fmean(rate or 0.0 for rate in each) for each in zip(*lines, strict=True)] if lines else None


def together(found: Found, name: str, alone: str) -> float | None:
    """Return the throughput of jobs together over one after the other: the sum of each one's rate over that alone."""
    ours, theirs = rates(found, name), rates(found, alone)
    if ours is None or theirs is None or not all(theirs):
        return None
    return sum(rate / of for rate, of in zip(ours, theirs, strict=True))


def over(first: float | None, second: float | None) -> float | None:
    """Return a ratio, where both are known."""
    return first / second if first is not None and second else None


def mean_of(values: list[float]) -> float | None:
    """Return the mean, nothing of none."""
    return statistics.fmean(values) if values else None


AGAIN = ", again"
"""Ends the name of a configuration's second turn: turns go forth and back, so that a drift falls on all alike."""


def _as_line(part: str, name: str, *what: str) -> tuple[str, ...]:
    return ("as_line.py", "--part", part, "--name", name, *what)


def _jobs(
    part: str,
    name: str,
    jobs: tuple[str, ...],
    words: str,
    expected_s: float,
    *,
    order: int,
    is_rehearsed: bool = False,
) -> Configuration:
    """Return a configuration of ``run_jobs.py``."""
    chosen = [word for job in jobs for word in ("--job", job)]
    command = ("run_jobs.py", "--part", part, "--name", name, *chosen, "--expected", str(expected_s), *words.split())
    needs = (
        () if "--peaks" in words else tuple(f"{record.PEAKS}/{job.replace(':', ' ')}" for job in dict.fromkeys(jobs))
    )
    rehearsal = ("--twin",) if is_rehearsed else None
    return Configuration(part, name, command, expected_s, needs, order, waits=True, rehearsal=rehearsal)


# -- a job alone -----------------------------------------------------------------------------------

DCGAN, GNMT, GPT2 = "dcgan:128:float32", "gnmt:256:bfloat16", "gpt2:16:bfloat16"
ALONE = (DCGAN, GNMT, GPT2, "bert_base:64:bfloat16", "resnet50:128:bfloat16")
_ROOMY = "--way zico --share 150 --of reserved"


def _alone() -> list[Configuration]:
    """Return the turns of each job: plain, Zico, Zico, plain.

    The first turns of all jobs come first: they say what each takes, and let nobody start beside.
    """
    made = []
    for number, job in enumerate(ALONE):
        turns = (("plain", "--peaks"), ("zico", _ROOMY), (f"zico{AGAIN}", _ROOMY), (f"plain{AGAIN}", ""))
        for turn, (name, words) in enumerate(turns):
            order = 50 + number if turn else 40
            is_rehearsed = job == DCGAN and turn < 2
            told = f"--seconds 3 {words}"
            made.append(_jobs("alone", f"{job}, {name}", (job,), told, 5.5, order=order, is_rehearsed=is_rehearsed))
    return made


def _alone_goals() -> tuple[Goal, ...]:
    goals = []
    for job in ALONE:

        def speed(found: Found, job: str = job) -> float | None:
            ours, theirs = (sum(rates(found, f"{job}, {way}") or [0.0]) for way in ("zico", "plain"))
            return over(ours or None, theirs or None)

        def held(found: Found, job: str = job) -> float | None:
            lines = [line["jobs"][0] for line in found.get(f"{job}, zico", ())]
            plain = [line["jobs"][0].get("max_memory_reserved") for line in found.get(f"{job}, plain", ())]
            return over(lines[0]["zico"]["peak_bytes"], plain[0]) if lines and plain else None

        goals.append(Goal(f"{job}: speed over that without Zico", speed, least=0.99))
        goals.append(Goal(f"{job}: held over what PyTorch reserves", held, most=1.05))
    return tuple(goals)


# -- the headline ----------------------------------------------------------------------------------

PAIRS = {"DCGAN x 2": (DCGAN, DCGAN), "GNMT x 2": (GNMT, GNMT), "GPT-2 + GNMT": (GPT2, GNMT)}
IN_TURN, PLAIN_MPS, ZICO_MPS, ZICO_SERIAL = "one after the other", "plain MPS, no ballast", "Zico MPS", "Zico serial"
PAIR_WAYS = {
    IN_TURN: "--way=in_turn",
    ZICO_MPS: "--way zico --mps --share 70 --ballast",
    PLAIN_MPS: "--way plain --mps",
    ZICO_SERIAL: "--way zico --policy serial --share 70 --ballast",
    "Zico slices": "--way zico --share 70 --ballast",
    "plain MPS, half each": "--way plain --mps --share 70 --ballast --half",
    "plain slices": "--way plain --share 70 --ballast",
}
"""What needs no ballast, or has a pool, comes before what nobody may start beside."""


def _headline() -> list[Configuration]:
    """Return all ways of all pairs, then the same backwards."""
    made = []
    once = [(pair, way) for pair in PAIRS for way in PAIR_WAYS]
    for number, (pair, way) in enumerate([*once, *once[::-1]]):
        is_second = number >= len(once)
        jobs = PAIRS[pair]
        made.append(
            _jobs(
                "headline",
                f"{pair}: {way}{AGAIN * is_second}",
                jobs,
                f"--seconds 4 {PAIR_WAYS[way]}",
                7.0 * len(set(jobs)) if way == IN_TURN else 8.0,
                order=(1000 if is_second else 100) + number,
                is_rehearsed=pair == "DCGAN x 2" and way in (IN_TURN, ZICO_MPS, "plain slices") and not is_second,
            )
        )
    return made


def _headline_goals() -> tuple[Goal, ...]:
    goals = []
    for pair in PAIRS:

        def of(found: Found, way: str, pair: str = pair) -> float | None:
            return together(found, f"{pair}: {way}", f"{pair}: {IN_TURN}")

        def beside_mps(found: Found, of: Ask = of) -> float | None:
            return over(of(found, ZICO_MPS), of(found, PLAIN_MPS))

        def beside_serial(found: Found, of: Ask = of) -> float | None:
            return over(of(found, ZICO_MPS), of(found, ZICO_SERIAL))

        def in_turn(found: Found, of: Ask = of) -> float | None:
            return of(found, ZICO_MPS)

        goals.append(Goal(f"{pair}: {ZICO_MPS} over {PLAIN_MPS}", beside_mps, least=0.95))
        goals.append(Goal(f"{pair}: {ZICO_MPS} over {IN_TURN}", in_turn, least=1.2))
        goals.append(Goal(f"{pair}: {ZICO_MPS} over {ZICO_SERIAL}", beside_serial, least=1.0))
    return tuple(goals)


# -- a pair in three quarters of its tensors -------------------------------------------------------

REGIONS = ("4MiB", "16MiB", "64MiB")
SPACINGS = {"0": 0, "64 MiB": 64 << 20, "1 GiB": 1 << 30}
_ALL = "no budget"


def _quarters() -> list[Configuration]:
    jobs = (DCGAN, DCGAN)
    made = [_jobs("quarters", _ALL, jobs, f"--seconds 4 {_ROOMY}", 7, order=300)]
    for region in REGIONS:
        for spacing, size in SPACINGS.items():
            words = f"--seconds 4 --way zico --share 75 --of allocated --region {region} --spacing {size}"
            made.append(_jobs("quarters", f"{region}, a mark every {spacing}", jobs, words, 6.5, order=301))
    return made


def _best_of_quarters(found: Found) -> float | None:
    """Return the best sum of rates over that without a budget."""
    base = rates(found, _ALL)
    others = [sum(own) for name in found if name != _ALL and (own := rates(found, name)) is not None]
    return over(max(others), sum(base)) if base and others else None


# -- less memory than the peak ---------------------------------------------------------------------

RESNET = "resnet50:128:float32"
SAVED = {60: 120.0, 80: 85.0}
"""Percent of its peak that the job may hold -> milliseconds of an iteration, in the mean over the whole run."""


def _saving() -> list[Configuration]:
    made = [_jobs("saving", "all of its peak", (RESNET,), "--seconds 4 --peaks", 7, order=310)]
    for share in SAVED:
        for save in ("auto", "zico"):
            words = f"--seconds 9 {_ROOMY} --limit {share} --save {save}"
            made.append(_jobs("saving", f"{share} %, {save}", (RESNET,), words, 13, order=312))
    words = f"--seconds 4 {_ROOMY} --limit 70 --save auto"
    made.append(_jobs("saving", "70 %, auto", (DCGAN,), words, 8, order=311, is_rehearsed=True))
    return made


def _saving_goals() -> tuple[Goal, ...]:
    goals = []
    for share, most_ms in SAVED.items():

        def ms(found: Found, save: str = "auto", share: int = share) -> float | None:
            return mean_of([line["jobs"][0]["mean_ms"] for line in found.get(f"{share} %, {save}", ())])

        def ahead(found: Found, ms: Ask = ms) -> float | None:
            return over(ms(found, "zico"), ms(found, "auto"))

        goals.append(Goal(f"{share} % of the peak, auto: ms an iteration, mean of the whole run", ms, most=most_ms))
        goals.append(Goal(f"{share} %: auto's speed over that of zico", ahead, least=1.0))
    return tuple(goals)


# -- all of it -------------------------------------------------------------------------------------


def _sweep_ratio(found: Found) -> float | None:
    """Return how much shorter a sweep is than its jobs one after the other."""
    serial, ours = (mean_of(numbers(found, way, "makespan_s")) for way in ("serial", "zico"))
    return over(serial, ours)


def _slowest_map(state: str) -> Callable[[Found], float | None]:
    """Read the longest median of a map and its access over sizes, in microseconds."""

    def read(found: Found) -> float | None:
        sizes = [size for line in found.get("sizes", ()) for size in line["microseconds"][state].values()]
        return max((size["map and access, one"] for size in sizes), default=None)

    return read


PARTS = (
    Part("probe", "Where do the seconds before a job's first iteration go?"),
    Part(
        "maps",
        "What does a map of a region cost, by size and by what runs beside it?",
        (
            Goal("a map and its access under kernels, us", _slowest_map("kernels"), most=300.0),
            Goal("the same beside a second process, us", _slowest_map("both"), most=300.0),
        ),
    ),
    Part("marks", "What does a mark on the device cost, by kernel, by stream operation and by event?"),
    Part(
        "bits",
        "Do drivers, kernels and other programs keep their contracts, with the same bits as without Zico?",
        (
            Goal("tests/gpu that failed", mean("tests", "failed"), most=0),
            Goal("programs that failed", mean("programs", "failed"), most=0),
        ),
    ),
    Part("alone", "What does Zico cost a job that has the GPU to itself?", _alone_goals()),
    Part("headline", "What is a pair worth in 70 % of what its jobs take?", _headline_goals()),
    Part(
        "sweep",
        "How much sooner do eight small jobs end in half of their memory?",
        (Goal("makespan of one after the other over that of a sweep", _sweep_ratio, least=2.5),),
    ),
    Part(
        "quarters",
        "What costs a pair in 75 % of its tensors: regions, or marks?",
        (Goal("the best over no budget", _best_of_quarters, least=0.95),),
    ),
    Part("saving", "What does a job lose that may hold less than its peak?", _saving_goals()),
    Part("driver", "What does the driver do that the manual leaves open?"),
)

CONFIGURATIONS = (
    Configuration("probe", "stages", ("probe.py",), 30, order=10),
    Configuration("maps", "sizes", ("maps.py",), 15, order=15),
    Configuration(
        "marks", "ways", _as_line("marks", "ways", "progress.py", "--rounds", "10"), 8, order=20, rehearsal=("--smoke",)
    ),
    Configuration("bits", "programs", ("bits.py",), 60, order=30),
    Configuration(
        "bits", "tests", _as_line("bits", "tests", "tests/gpu"), 45, order=35, rehearsal=("--twin", "-k", "driver")
    ),
    *_alone(),
    *_headline(),
    Configuration("sweep", "serial", ("sweep.py", "serial"), 32, order=200, rounds=2),
    Configuration("sweep", "zico", ("sweep.py", "zico"), 30, ("sweep/serial",), order=201, rounds=2),
    *_quarters(),
    *_saving(),
    Configuration("driver", "facts", _as_line("driver", "facts", "driver_facts.py"), 30, order=400),
)
