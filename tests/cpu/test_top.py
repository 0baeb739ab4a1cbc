"""The frame of ``zico top`` and its keys, on fixed states."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from zico.broker.protocol import messages as m
from zico.cli.options import share_text
from zico.cli.top_screen import BAR_CELLS, Asks, Rates, Row, Screen, frame, keys_in, pool_bar, pressed

MIB = 1 << 20
HERE, THERE = Path("here"), Path("there")


def job(place: int, name: str, **figures: object) -> m.JobReport:
    """Return a job that runs and holds a quarter of the budget."""
    usual = {"framework": "torch", "pid": 100 + place, "state": "running", "held_bytes": 16 * MIB, "iterations": 7}
    return m.JobReport(name=name, job=place, **(usual | figures))  # type: ignore[arg-type] # each field by its name


def status(*jobs: m.JobReport, uptime_s: float = 3725.0) -> m.Status:
    """Return a pool of 64 MiB."""
    return m.Status(
        schema_version=m.STATUS_SCHEMA,
        policy="zico",
        uptime_s=uptime_s,
        region_bytes=4 * MIB,
        budget_bytes=64 * MIB,
        granted_bytes=sum(job.held_bytes for job in jobs),
        physical_bytes=0,
        peak_granted_bytes=60 * MIB,
        peak_physical_bytes=0,
        jobs=jobs,
        first_budget_bytes=64 * MIB,
        most_bytes=96 * MIB,
    )


def lines_of(found: m.Status, screen: Screen | None = None, width: int = 160) -> list[str]:
    """Return what a terminal without colours shows."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(frame([(HERE, found)], width, screen))
    return [line.rstrip() for line in file.getvalue().splitlines()]


TWO = status(
    job(0, "resnet", iterations_per_s=1.69, peak_bytes=24 * MIB, claim_bytes=20 * MIB),
    job(
        2,
        "lm",
        state="boundary",
        waiting_s=3.24,
        waits_for=(0,),
        limit_bytes=32 * MIB,
        share=m.Share(weight=2.0),
        evicted_bytes=8 * MIB,
        away_bytes=4 * MIB,
        saving=m.Saving(out_bytes=2 * MIB, out_now_bytes=MIB),
    ),
)


def test_a_frame_shows_the_pool_and_its_jobs() -> None:
    """The whole frame, as text."""
    waits = "waits to start 3.2 s, for resnet"
    assert lines_of(TWO) == [
        "host, policy zico, up 1:02:05: jobs hold 32 MiB of 64 MiB (peak 60 MiB)",
        "[" + "█" * 15 + "▓" * 15 + "·" * 30 + "]",
        "",
        "    job     it/s  iterations     now    peak   claim   limit  share     moved               state",
        " █  resnet  1.69           7  16 MiB  24 MiB  20 MiB                                        running",
        f" ▓  lm      0.00           7  16 MiB     0 B     0 B  32 MiB  weight 2  10 MiB, 5 MiB away  {waits}",
    ]


def test_a_frame_leaves_out_what_nobody_has() -> None:
    """Without limits, shares and moves there are no columns for them; a paused job has no pace, and does not wait."""
    *_, head, row = lines_of(status(job(0, "a", state="paused", iterations_per_s=3.0)))
    assert head.split() == ["job", "it/s", "iterations", "now", "peak", "claim", "state"]
    assert row.split() == ["█", "a", "7", "16", "MiB", "0", "B", "0", "B", "paused"]
    assert lines_of(status())[-1] == "no job has joined yet"
    waits = job(0, "a", waiting_s=0.5, need_bytes=MIB)
    assert lines_of(status(waits))[-1].endswith("waits for memory 0.5 s")


def test_a_share_of_the_processors_has_a_column() -> None:
    """There if some job has one, beside what else the job gets, which is shown as without it."""
    few, both, none = m.Share(compute=0.3), m.Share(weight=2.0, compute=1 / 256), m.Share()
    *_, head, first, second, third = lines_of(
        status(*(job(n, "a", share=one) for n, one in enumerate((few, both, none))))
    )
    assert head.split()[-3:] == ["compute", "share", "state"]
    assert [line.split()[10:] for line in (first, second, third)] == [
        ["30%", "running"],
        ["0.4%", "weight", "2", "running"],
        ["running"],
    ]
    assert share_text(m.Share(compute=0.3)) == "weight 1, 30% of the processors"


def test_a_screen_adds_keys_and_what_they_came_to() -> None:
    """The job that is selected is marked; below stand the keys, and what is asked for or was said."""
    lines = lines_of(TWO, Screen(selected=9, message="lm goes on"))
    assert [line[0] for line in lines[4:6]] == [" ", ">"], "the last one: there are no more"
    assert "q quit" in lines[-2]
    assert lines[-1] == "lm goes on"
    assert (
        lines_of(TWO, Screen(asks=Asks.LIMIT, about=Row(HERE, "resnet"), typed="2G"))[-1]
        == "limit of resnet (such as 2GiB, none): 2G_"
    )


def test_a_frame_fits_a_narrow_terminal() -> None:
    """Columns go one after the other; name, pace, memory now and the beginning of the state are there."""
    for width, columns in ((100, 8), (80, 6), (64, 5)):
        lines = lines_of(TWO, Screen(), width=width)
        assert max(map(len, lines)) <= width
        assert len(lines[3].split()) == columns
        assert re.match(r" ▓  lm +0.00 .*16 MiB .*waits to start 3", lines[5])


def test_the_bar_is_as_long_as_the_budget_or_as_what_is_held() -> None:
    """Shares are rounded so that they add up; a budget that was lowered below what jobs hold makes no longer bar."""
    sevenths = [job(place, "a", held_bytes=MIB) for place in range(7)]
    for budget_bytes in (7 * MIB, 14 * MIB, MIB, 0):
        bar = pool_bar(sevenths, budget_bytes).plain
        assert len(bar) == BAR_CELLS + 2
        assert bar.count("·") == (BAR_CELLS // 2 if budget_bytes == 14 * MIB else 0)


def test_rates_are_those_of_late() -> None:
    """What was ten seconds ago counts no more; a job that is slow or new has the mean since its start."""
    rates = Rates()
    for second in range(31):
        fast, slow = 2 * second if second <= 15 else 30 + 5 * (second - 15), second // 8
        now = status(
            job(0, "a", iterations=fast), job(1, "b", iterations=slow, iterations_per_s=0.125), uptime_s=second
        )
        noted = rates.noted(now)
    assert noted == {(0, 100): pytest.approx(5.0), (1, 101): 0.125}
    assert rates.noted(status(job(0, "c", pid=7, iterations=9, iterations_per_s=1.5), uptime_s=31.0)) == {(0, 7): 1.5}


def press(keys: str, screen: Screen | None = None, **pools: m.Status) -> tuple[Screen, list[tuple[str, m.Change]]]:
    """Return what comes of keys, one after the other."""
    shown = [(Path(name), pool) for name, pool in pools.items()] or [(HERE, TWO)]
    now, changes = screen or Screen(), []
    for key in keys_in(keys.encode()):
        now, wanted = pressed(now, key, shown)
        changes += [] if wanted is None else [(wanted[0].name, wanted[1])]
    return now, changes


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ("p", m.Change(job="resnet", paused=True)),
        ("\x1b[Bm", m.Change(job="lm", paused=True, move=True)),
        ("jkjr", m.Change(job="lm", paused=False)),
        ("l2GiB\r", m.Change(job="resnet", limit_bytes=2 << 30)),
        ("lnone\r", m.Change(job="resnet", limit_bytes=0)),
        ("jw25\x7f.5\n", m.Change(job="lm", weight=2.5)),
        ("b50%\r", m.Change(budget_bytes=32 * MIB)),
        ("bnone\r", m.Change(budget_bytes=96 * MIB)),
    ],
)
def test_keys_ask_for_changes(keys: str, change: m.Change) -> None:
    """Each key, and what is typed after it, is one change of the selected job or of the pool."""
    assert press(keys) == (Screen(selected=int(keys[0] in "j\x1b")), [("here", change)])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("wx\r", "'x' is not a weight"),
        ("w-1\r", "'-1' is not a weight"),
        ("l2 parsecs\r", "'2 parsecs' is not a size"),
        ("b0\r", "more than zero"),
        ("l\r", ""),
        ("l2G\x1b", ""),
        ("xyz\x1b[5~\x00é", ""),
        ("\x1b[A", ""),
    ],
)
def test_keys_that_ask_for_nothing_change_nothing(keys: str, message: str) -> None:
    """What cannot be is told in a sentence; an empty figure, Escape and other keys do nothing."""
    screen, changes = press(keys)
    assert changes == []
    assert message in screen.message
    assert (screen.asks, screen.typed, screen.ends, bool(screen.message)) == (None, "", False, bool(message))


def test_keys_without_a_job() -> None:
    """Keys that are about a job say that there is none, also if it has gone while something was typed."""
    for key in "plw":
        assert press(key, here=status())[0].message == "no job has joined yet"
    asked, _ = press("l1")
    assert press("G\r", asked, here=status())[0].message == "the job has ended"


def test_pools_stand_one_below_another() -> None:
    """A pool without a job has a row of its own, so that its budget can be changed."""
    file = io.StringIO()
    shown = [(HERE, status(job(0, "a"))), (THERE, status()), (Path("last"), status(job(0, "d")))]
    for selected in (2, 1, 0):
        Console(file=file, width=120, highlight=False).print(frame(shown, 120, Screen(selected=selected)))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert [line.startswith("host, policy") for line in lines[:6]] == [True, False, False, False, False, False]
    assert (lines[4][:4], lines[5], lines[6][:5], lines[9]) == (" █  ", "", "host,", "no job has joined yet")
    assert [line.split()[-1] for line in lines if line.startswith(">")] == ["running", "yet", "running"]
    assert [at // 16 for at, line in enumerate(lines) if line.startswith(">")] == [0, 1, 2], "one in each frame"
    pools = {"here": status(job(0, "a")), "there": status(job(0, "b"), job(1, "c"))}
    assert press("jjp", **pools)[1] == [("there", m.Change(job="c", paused=True))]
    assert press("kb1MiB\r", here=status(), there=TWO)[1] == [("here", m.Change(budget_bytes=MIB))]


def test_what_is_typed_is_for_what_was_chosen() -> None:
    """A job or a pool above may come or go meanwhile; one that has gone is told."""
    asked, _ = press("jl1", here=status(job(0, "a")), there=status(job(0, "b")))
    later = {"new": status(job(0, "b")), "there": status(job(0, "c"), job(1, "b"))}
    assert press("G\r", asked, **later)[1] == [("there", m.Change(job="b", limit_bytes=1 << 30))]
    assert press("G\r", asked, here=status(job(0, "a")))[0].message == "the broker has ended"
    assert lines_of(status(job(0, "a")), asked)[-1] == "limit of b (such as 2GiB, none): 1_"


def test_q_ends_but_not_while_something_is_typed() -> None:
    """A letter that is typed is no key."""
    assert press("q")[0].ends
    assert press("lq")[0] == Screen(asks=Asks.LIMIT, about=Row(HERE, "resnet"), typed="q")
