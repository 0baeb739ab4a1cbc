"""What a broker would see of jobs in the simulator: a look every 20 ms, and whenever an iteration begins or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.broker.speeds import Look, Speeds
from zico.pool.layout import JobState
from zico.scheduler.engine import Stop
from zico.scheduler.layout import NO_TIME
from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.scheduler.simulate import Load
    from zico.scheduler.state import CompiledPolicy

LOOK_NS = 20_000_000
STEP_NS = 2_000_000


class Watched(Simulation):
    """A simulation that stops for looks."""

    def __init__(self, policy: CompiledPolicy, loads: Sequence[Load], budget: int, slowdown: Sequence[float]) -> None:
        """Take jobs that are really so much slower together."""
        super().__init__(policy, loads, budget, 1, slowdown=slowdown)
        self._inside = [False] * len(self.loads)
        self._total_ns = [0] * len(self.loads)
        self._waited_ns = [0] * len(self.loads)

    def shown_to(self, speeds: Speeds, until_ns: int) -> None:
        """Run so far while these look on."""
        looked_ns, before = 0, None
        for now_ns in range(0, until_ns, STEP_NS):
            while self._advance(now_ns) == Stop.CHANGED:
                self._make_plan()
            self._note_waits()
            now = [self.sim_jobs[name].tolist() for name in ("iteration", "started_ns", "phase")]
            if now != before or now_ns - looked_ns >= LOOK_NS:
                before, looked_ns = now, now_ns
                speeds.observe(now_ns, self._looks(now_ns))

    def _note_waits(self) -> None:
        """Sum up what jobs waited inside their iterations, which the simulator does not tell from other waits."""
        for number, sim_job in enumerate(self.sim_jobs):
            total_ns = int(sim_job["waited_ns"])
            if self._inside[number]:
                self._waited_ns[number] += total_ns - self._total_ns[number]
            self._total_ns[number] = total_ns
            self._inside[number] = int(sim_job["phase"]) == JobState.RUNNING

    def _looks(self, now_ns: int) -> dict[int, Look]:
        return {
            number: Look(
                iteration=int(sim_job["iteration"]),
                inside=self._inside[number],
                began_ns=int(sim_job["started_ns"]),
                ended_ns=int(sim_job["served_at_ns"]),
                blocked_ns=self._blocked_ns(number),
                waited_ns=self._waited_ns[number],
                done=self._done(number, now_ns),
                n_events=self.loads[number].profile.n_events if sim_job["profiled"] else 0,
            )
            for number, sim_job in enumerate(self.sim_jobs)
            if sim_job["present"]
        }

    def _blocked_ns(self, number: int) -> int:
        since_ns = int(self.sim_jobs[number]["waiting_since_ns"])
        return since_ns if self._inside[number] and since_ns != NO_TIME else 0

    def _done(self, number: int, now_ns: int) -> float:
        """Return the share of a job's events, of which each bin of its profile has as many."""
        run, sim_job, profile = self._run[0], self.sim_jobs[number], self.loads[number].profile
        if not self._inside[number]:
            return 0.0
        steps_ns = [*profile.record["step_ns"][0, : int(profile.record["n_steps"][0])].tolist(), profile.duration_ns]
        at_ns, end_ns = steps_ns[int(sim_job["step"])], steps_ns[int(sim_job["step"]) + 1]
        if sim_job["busy"]:
            slower = self._slowdown[min(int(run["n_busy"]), len(self._slowdown) - 1)]
            clock = int(run["clock"]) + (now_ns - int(run["now_ns"])) / slower
            at_ns += (end_ns - at_ns) * min(1.0, (clock - int(sim_job["step_since"])) / int(sim_job["step_length"]))
        n = len(profile.held)
        return float(np.interp(at_ns, [*profile.t_ns, profile.duration_ns], np.arange(n + 1) / n))
