"""What ``zico fit --measure`` makes of what it sees: windows of iterations, gains, advice."""

from __future__ import annotations

import pytest

from zico.cli import main
from zico.cli.measure import Together, advice
from zico.launch.measuring import LEAST, WARM_UP, Seen, Window


def seen(window: Window, looks: dict[str, list[int]], step_s: float = 0.1, waited_s: float = 0.0) -> Window:
    """Let a window see so many iterations of each job at one look after the other."""
    for number, counts in enumerate(zip(*looks.values(), strict=True)):
        t_s = number * step_s
        window.add({name: Seen(t_s, n, waited_s * t_s) for name, n in zip(looks, counts, strict=True)})
    return window


def test_a_speed_is_counted_between_iterations_ends_once_all_are_warm() -> None:
    """What a job does before the slowest one is warm does not count, nor do the window's ends."""
    warm = [0] * 20 + [WARM_UP] * 2
    fast = [*range(0, 40, 2), 40, 40]
    looks = {"a": [*fast, *range(42, 62, 2)], "b": [*warm, *(WARM_UP + n // 2 for n in range(10))]}
    window = seen(Window(["a", "b"], seconds=0.5), looks)
    assert window.is_warm
    speeds = {name: round(speed.iterations_per_s, 6) for name, speed in window.speeds().items()}
    assert speeds == {"a": 20.0, "b": 5.0}


def test_a_window_is_full_after_its_time_and_enough_iterations() -> None:
    """A slow job has at least so many iterations, however short the time; a fast one the time."""
    slow = Window(["a"], seconds=0.1)
    counts = [*range(WARM_UP), *(WARM_UP + n // 4 for n in range(4 * (LEAST + 2)))]
    full = [seen(slow, {"a": counts[:n]}).is_full for n in (len(counts) - 9, len(counts))]
    assert full == [False, True]
    fast = Window(["a"], seconds=3.0)
    assert not seen(fast, {"a": list(range(0, 100, 5))}).is_full
    assert seen(fast, {"a": list(range(0, 300, 5))}).is_full


def test_a_share_of_waiting_is_one_of_the_window() -> None:
    """A job that waits for half of the time says so."""
    window = seen(Window(["a"], seconds=0.5), {"a": list(range(40))}, waited_s=0.5)
    assert round(window.speeds()["a"].waited, 6) == 0.5


def way(options: str, gain: float, waited: float = 0.0) -> Together:
    """Return a way in which two jobs ran together."""
    return Together(options, gain, [1.0, 1.0], [waited, 0.0], [0, 0])


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        (
            [way("", 1.41)],
            (
                "run them together (zico run): one alone leaves a part of the device idle, and together they do 1.41 "
                "times what one after the other does"
            ),
        ),
        (
            [way("", 1.2), way("--mps", 1.51)],
            (
                "run them together (zico run --mps): one alone leaves a part of the device idle, and together they do "
                "1.51 times what one after the other does"
            ),
        ),
        (
            [way("", 0.9), way("--policy serial", 0.94, waited=0.5)],
            (
                "run them one after the other: one job keeps the device busy, and the fastest way together "
                "(zico run --policy serial) does 0.94 times as much in the same time"
            ),
        ),
        (
            [way("", 1.2, waited=0.25)],
            (
                "run them together (zico run): one alone leaves a part of the device idle, and together they do 1.20 "
                "times what one after the other does; a job waited 25% of the time, which a larger --budget may shorten"
            ),
        ),
        (
            [way("", 0.8, waited=0.4), way("--policy serial", 0.7, waited=0.5)],
            (
                "run them one after the other: the fastest way together (zico run) does 0.80 times as much in the same "
                "time; a job waited 40% of the time, which a larger --budget may shorten"
            ),
        ),
    ],
)
def test_advice_names_the_fastest_way(ways: list[Together], told: str) -> None:
    """From 5 % on sharing pays; whoever waits for memory is told of the budget and not of a busy device."""
    assert advice(ways, "zico", on_gpu=False, mps=False) == told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--measure", "true"], "one command shares with nobody: give two or more"),
        (["--measure", "true", "'"], "cannot split the command"),
        (["--measure", "--mps", "true", "true"], "--mps: jobs share the host without it"),
        (["--measure", "--device", "host:0,host:1", "true", "true"], "--device: jobs are measured on one device"),
        (["--measure", "--seconds", "0", "true", "true"], "--seconds 0: give seconds above 0"),
        (["--measure", "--deadline", "nan", "true", "true"], "--deadline nan: give seconds above 0"),
        (["--measure", "--save", "none", "true", "true"], "--save is about files: leave it out with --measure"),
        (["--measure", "--budget", "much", "true", "true"], "'much' is not a size"),
        (["--measure", "--policy", "gandiva", "true", "true"], "--policy"),
        (["--mps", "--budget", "1GiB", "file"], "--mps is about commands: add --measure"),
        (["--seconds", "1", "--budget", "1GiB", "file"], "--seconds is about commands: add --measure"),
        (["file"], "--budget: say how much memory the jobs share"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2, as after any error of zico fit, and a line that says what to give; nothing was started."""
    assert main(["fit", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1
