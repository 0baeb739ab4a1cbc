"""What is sharing a GPU worth? Measures by configuration, in order of value, over as many leases as it takes.

``DIR/results.jsonl`` gets a line for each configuration at once (``record.py``), ``DIR/log.txt``
what was printed. A configuration that has a line is not run again, except one that failed, which is
tried again in a later call behind those that were never tried. A configuration that does not end in
time is killed and counts as done. What does not fit into the seconds that are left gives way to
what does. The last lines say of each goal whether it was met, missed, or not measured.

``--earlier FILE`` begins with the results of an earlier lease. ``--twin`` rehearses the same
commands without a GPU: on the driver's software twin, or on the host where a framework computes. No
figure of a rehearsal is judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import carry
import common
import ready
import record
import run_parts

if TYPE_CHECKING:
    from types import FrameType

GPU = Path(__file__).resolve().parent
QUESTION = "What is sharing a GPU worth?"
NO_GPU = "there is no GPU that Zico can use (--twin rehearses without one)"
LEASE = "lease"
"""The part of the line that says where and with what all lines behind it were measured."""
WARMING = ("-m", "zico.base.warming")
"""Ends at once where all machine code is there, carried or of an earlier call."""
CHECK_S = 60.0
"""For the question whether there is a GPU."""
HANG_S = 20.0
"""After the expected time; then the configuration is asked to end, and killed ``ready.ORDERLY_S`` later."""
SLOWER = 10.0
"""A rehearsal's time over the expected one, at most: software stands in for the device."""
SPARE_S = 4.0
"""At the end of a call, to kill what runs and to write."""

Unit = tuple[run_parts.Configuration, int]
"""A configuration, and which repeat of it."""


class Run:
    """The results in one directory, and the call that adds to them."""

    def __init__(self, options: argparse.Namespace, work: Path, log: IO[str]) -> None:
        """Take what is there.

        Raises:
            SystemExit: The results there are of the other mode.
        """
        self._twin: bool = options.twin
        self._end_s = time.monotonic() + options.seconds
        self._work = work
        self._log = log
        self._file: Path = options.output / "results.jsonl"
        if options.earlier and options.earlier.exists() and not self._file.exists():
            shutil.copyfile(options.earlier, self._file)
        record.close_line(self._file)
        leases = [line for line in record.lines(self._file) if line["part"] == LEASE]
        if any(line["figures"]["twin"] != self._twin for line in leases):
            sys.exit(f"{self._file} holds results {'without' if self._twin else 'of a rehearsal with'} --twin: move it")
        self._lease = len(leases) + 1
        self._chosen = [one for one in run_parts.CONFIGURATIONS if not options.only or one.part in options.only]
        if self._twin:
            self._chosen = [dataclasses.replace(one, rounds=1) for one in self._chosen if one.rehearsal is not None]
        self._tried: set[Unit] = set()
        self._numbers = itertools.count()
        self._early: tuple[Unit, ready.Process] | None = None

    # -- what there is to do -----------------------------------------------------------------------

    def left_s(self) -> float:
        """Return the seconds until this call must end."""
        return self._end_s - SPARE_S - time.monotonic()

    def _states(self) -> dict[tuple[str, int], str]:
        """Return the newest status of each configuration's round."""
        return {(f"{line['part']}/{line['name']}", line["round"]): line["status"] for line in record.lines(self._file)}

    def _open(self) -> list[Unit]:
        """Return what has no result, the most valuable first, and what failed in an earlier call last."""
        states = self._states()
        units = [
            (states.get((one.key, turn)) == record.FAILED, turn, one.order, number)
            for number, one in enumerate(self._chosen)
            for turn in range(1, one.rounds + 1)
            if states.get((one.key, turn)) not in (record.DONE, record.KILLED)
        ]
        return [(self._chosen[number], turn) for _, turn, _, number in sorted(units)]

    def _next(self, left_s: float, *, but: Unit | None = None) -> Unit | None:
        """Return the most valuable that fits, was not tried in this call, and has what it needs."""
        done = {key for (key, _), status in self._states().items() if status == record.DONE}
        for unit in self._open():
            if unit not in (but, *self._tried) and unit[0].expected_s <= left_s and done.issuperset(unit[0].needs):
                return unit
        return None

    # -- running it --------------------------------------------------------------------------------

    def begin(self) -> str:
        """Write where and with what is measured; returns why nothing can run here, or nothing."""
        begun_s = time.monotonic()
        carried = carry.folder()
        figures: dict[str, Any] = {"twin": self._twin, "commit": carry.commit(carried)}
        figures |= {"machine": common.machine(), "versions": common.versions(), "carried_files": carry.unpack(carried)}
        warming = ready.Process([sys.executable, *WARMING], log=self._log)
        argv = [sys.executable, str(GPU / "driver_facts.py"), "--fact", "device", *(["--twin"] * self._twin)]
        try:
            asked = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            warming.kill()
            return f"{NO_GPU}: it did not answer within {CHECK_S:.0f} s"
        if asked.returncode:
            warming.kill()
            return f"{NO_GPU}: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}"
        figures |= {"device": json.loads(asked.stdout), "compile_cache": warming.finish(self.left_s())}
        seconds = time.monotonic() - begun_s
        record.append(self._file, LEASE, str(self._lease), figures, seconds=seconds)
        code = f"{figures['carried_files']} files of machine code carried, compiling others {figures['compile_cache']}"
        common.note(f"ready after {seconds:.0f} s: {code}; {self.left_s():.0f} s left")
        return ""

    def run(self) -> None:
        """Run what fits, one configuration after the other."""
        while (unit := self._next(self.left_s())) is not None:
            process = self._taken(unit)
            self._tried.add(unit)
            begun_s, left_s = time.monotonic(), self.left_s()
            process.release()
            self._start_early(unit)
            allowed_s = unit[0].expected_s * (SLOWER if self._twin else 1) + HANG_S
            state = process.finish(min(allowed_s, left_s))
            self._close_unit(unit, state, process.exit_code, time.monotonic() - begun_s, is_cut=left_s < allowed_s)

    def _taken(self, unit: Unit) -> ready.Process:
        """Return the unit's process, which may have been started early."""
        if self._early is not None:
            (early, process), self._early = self._early, None
            if early == unit:
                return process
            process.kill()
        return self._started(unit)

    def _started(self, unit: Unit) -> ready.Process:
        configuration, turn = unit
        go = self._work / f"go-{next(self._numbers)}" if configuration.waits else None
        script, *rest = configuration.command
        argv = [sys.executable, str(GPU / script), "--result", str(self._file), "--round", str(turn)]
        argv += ["--go", str(go)] if go else []
        argv += [*rest, *((configuration.rehearsal or ()) if self._twin else ())]
        self._log.write(f"\n== {configuration.key}, round {turn}\n")
        self._log.flush()
        return ready.Process(argv, log=self._log, go=go)

    def _start_early(self, running: Unit) -> None:
        """Start what comes next, if it can wait without the device."""
        unit = self._next(self.left_s() - running[0].expected_s, but=running)
        if unit is not None and unit[0].waits:
            self._early = unit, self._started(unit)

    def _close_unit(self, unit: Unit, state: str, exit_code: int | None, seconds: float, *, is_cut: bool) -> None:
        """Write the line that the command did not write itself, and say how it went."""
        configuration, turn = unit
        said = self._states().get((configuration.key, turn))
        if state == ready.KILLED and is_cut:
            said, why = record.CUT, "this call's time was over"
        elif said == record.DONE:  # whatever became of the command afterwards
            why = ""
        elif state == ready.KILLED:
            said, why = record.KILLED, "" if said == record.KILLED else f"had not ended after {seconds:.0f} s"
        elif said != record.FAILED:
            said, why = record.FAILED, f"exit code {exit_code}" if exit_code else "wrote no line"
        else:
            why = ""
        if why:
            self._append(unit, said, {"why": why}, seconds)
        common.note(f"{configuration.key}, round {turn}: {said}, {seconds:.0f} s; {self.left_s():.0f} s left")

    def _append(self, unit: Unit, status: str, figures: dict[str, Any], seconds: float) -> None:
        configuration, turn = unit
        record.append(
            self._file, configuration.part, configuration.name, figures, seconds=seconds, turn=turn, status=status
        )

    def close(self) -> None:
        """End what was started early."""
        if self._early is not None:
            self._early[1].kill()

    # -- what it comes to --------------------------------------------------------------------------

    def tell(self) -> bool:
        """Say of each goal whether it is met; returns whether all that has run is as it should be."""
        parts = {one.part for one in self._chosen}
        found: dict[str, run_parts.Found] = {part: {} for part in parts}
        for line in record.lines(self._file):
            if line["part"] in parts and line["status"] == record.DONE:
                found[line["part"]].setdefault(line["name"], []).append(line["figures"])
        good = True
        for part in run_parts.PARTS:
            for goal in part.goals if part.name in parts else ():
                value = goal.value(found[part.name])
                bounds = [
                    f"{word} {bound:g}"
                    for word, bound in (("at least", goal.least), ("at most", goal.most))
                    if bound is not None
                ]
                said = "not run" if value is None else "not judged in a rehearsal"
                if value is not None and not self._twin:
                    said = "met" if goal.is_met(value) else "MISSED"
                    good &= goal.is_met(value)
                shown = "-" if value is None else f"{value:.4g}"
                common.note(f"{part.name}: {goal.figure}: {shown}, {' and '.join(bounds)}: {said}")
        states = self._states()
        failed = [key for (key, _), status in states.items() if status in (record.FAILED, record.KILLED)]
        left = [f"{one.key}, round {turn}" for one, turn in self._open()]
        for what, names in (("failed or killed", failed), ("not run", left)):
            if names:
                common.note(f"{what}: {'; '.join(names)}")
        return good and not failed


# -- the command -----------------------------------------------------------------------------------


def listed(*, as_json: bool) -> str:
    """Return the parts and configurations with their expected seconds."""
    known = sorted(run_parts.CONFIGURATIONS, key=lambda one: one.order)
    if as_json:
        keys = ("part", "name", "expected_s", "rounds", "order", "needs", "rehearsal")
        return json.dumps([{key: getattr(one, key) for key in keys} for one in known], indent=1)
    lines = []
    for part in sorted(run_parts.PARTS, key=lambda one: min((c.order for c in known if c.part == one.name), default=0)):
        own = [one for one in known if one.part == part.name]
        lines.append(f"{sum(one.expected_s * one.rounds for one in own):5.0f} s  {part.name}: {part.question}")
        lines += [f"{one.expected_s:9.0f} s  {one.name}{f', {one.rounds} rounds' * (one.rounds > 1)}" for one in own]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/gpu-run"), metavar="DIR", help="for results")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call in all (default: %(default)g)")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="results.jsonl of an earlier lease, to go on from")
    parts = [part.name for part in run_parts.PARTS]
    parser.add_argument("--only", action="append", choices=parts, help="only these parts")
    parser.add_argument("--twin", action="store_true", help="rehearse without a GPU; no figure is judged")
    parser.add_argument("--list", action="store_true", help="only say what there is to run")
    parser.add_argument("--json", action="store_true", help="with --list, as JSON")
    return parser.parse_args()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Measure; returns 0 if nothing failed and no goal was missed, 130 if interrupted, else 1."""
    options = _options()
    if options.list:
        print(listed(as_json=options.json))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    ready.adopt()
    options.output = options.output.resolve()  # commands run in the checkout
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, (options.output / "log.txt").open("a") as log:
        run = Run(options, Path(work), log)
        try:
            why = run.begin()
            if why:
                common.note(why)
                return 1
            run.run()
        except KeyboardInterrupt:
            common.note("interrupted: what was found so far is in the results")
            return 130
        finally:
            run.close()
        return int(not run.tell())


if __name__ == "__main__":
    sys.exit(main())
