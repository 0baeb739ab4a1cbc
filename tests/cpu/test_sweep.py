"""Jobs of a sweep: grids and jobs' files expand to what they say, and nothing that has ended is run again."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.paths import SETTINGS_VARIABLE
from zico.broker.protocol.messages import RefusedRequest, Share
from zico.cli import main
from zico.cli.sweep import parse_at_most
from zico.lab.simulator.jobs_file import read_jobs
from zico.launch.jobs import Command, Stream, split_commands, up_to_script
from zico.launch.placement import Offer
from zico.launch.queue import PoolNow, Queue, Unlimited, tells_out_of_memory
from zico.launch.sweep import MAX_SWEEP_NAME_BYTES, SweepJob, grid_jobs, parse_grids, read_jobs_file
from zico.launch.sweep_file import JobResult, Sweep, SweepFile
from zico.report.model import JobFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def expanded(command: str, *grids: str) -> tuple[SweepJob, ...]:
    """Return the jobs of one command and some grids."""
    return grid_jobs(split_commands([command]), parse_grids(grids))


# -- grids -----------------------------------------------------------------------------------------


def test_grids_make_all_combinations_in_the_order_given() -> None:
    """The last grid changes fastest, a range has both ends, names are the parameters, doubled braces are braces."""
    jobs = expanded("python train.py {lr} -s={seed} '{{a}}'", "lr=0.1,0.01", "seed=-1..1,7")
    assert [job.name for job in jobs] == [f"lr={lr},seed={seed}" for lr in ("0.1", "0.01") for seed in (-1, 0, 1, 7)]
    assert jobs[1].argv == ("python", "train.py", "0.1", "-s=0", "{a}")
    assert jobs[1].parameters == {"lr": "0.1", "seed": "0"}


VALUES = st.lists(st.text("abc .1{}-\"'", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=3, unique=True)


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_any_values_arrive_as_they_are_in_jobs_with_names_of_their_own(values: list[list[str]]) -> None:
    """Each combination is there once, unharmed by spaces, quotes and braces in values; no name is too long or twice."""
    grids = [f"p{i}={','.join(each)}" for i, each in enumerate(values)]
    jobs = expanded("prog " + " ".join(f"{{p{i}}}" for i in range(len(values))), *grids)
    assert [job.argv[1:] for job in jobs] == list(itertools.product(*values))
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert max(len(name.encode()) for name in names) <= MAX_SWEEP_NAME_BYTES


def test_names_are_numbers_where_the_pool_would_mistake_them() -> None:
    """The second process of a job v=1 would be called v=1.2 in the pool, as the other job."""
    assert [job.name for job in expanded("python train.py {v}", "v=1,1.2")] == ["train-1", "train-2"]


def test_names_leave_room_for_a_second_try() -> None:
    """A name of 34 bytes is kept, and with one of 35 all are numbers."""
    kept, cut = "x" * (MAX_SWEEP_NAME_BYTES - 2), "x" * (MAX_SWEEP_NAME_BYTES - 1)
    assert [job.name for job in expanded("a {v}", f"v={kept}")] == [f"v={kept}"]
    assert [job.name for job in expanded("a {v}", f"v={kept},{cut}")] == ["a-1", "a-2"]


def test_each_of_several_commands_has_the_grids_that_it_uses() -> None:
    """A command without placeholders is one job, and names begin with the command's."""
    jobs = grid_jobs(split_commands(["a.sh {x}", "b.sh"]), parse_grids(["x=1,2"]))
    assert [(job.name, job.owner) for job in jobs] == [("a,x=1", "a"), ("a,x=2", "a"), ("b", "b")]


@pytest.mark.parametrize(
    ("command", "grids", "said"),
    [
        ("a {lr}", ["seed=1"], "{lr} in \"a '{lr}'\" is not among the names of --grid (seed): give it there"),
        ("a", ["seed=1"], "no command uses --grid seed: put {seed} into one"),
        ("a {x}", ["x="], "--grid 'x=' has an empty value: give at least one"),
        ("a {x}", ["x=1,,2"], "has an empty value"),
        ("a {x}", ["x=3..1"], "the range 3..1 is empty: give the smaller number first"),
        ("a {x}", ["x=0..99999999"], "makes more than 10000 jobs"),
        ("a {x} {y}", ["x=1..200", "y=1..200"], "the grids make 40000 jobs"),
        ("a {x}", ["x=1,1"], "has '1' twice"),
        ("a {x}", ["x=1", "x=2"], "--grid x is given twice"),
        ("a {x}", ["x"], "is no grid: give NAME=VALUE"),
        ("a {x} {", ["x=1"], "has a single brace"),
        ("a {x!r}", ["x=1"], "braces around what is no name"),
        ("a '{\"k\": 1}' {x}", ["x=1"], "write {{ and }} for braces"),
    ],
)
def test_a_grid_that_cannot_be_is_one_sentence_with_what_to_do(command: str, grids: list[str], said: str) -> None:
    """Nothing has been started by then."""
    with pytest.raises(ConfigError) as found:
        expanded(command, *grids)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("python -u train.py --lr 1", ("python", "-u", "train.py")),
        ("python -m pkg.train --lr 1", ("python", "-m", "pkg.train")),
        ("python -c code x", ("python", "-c", "code")),
        ("prog --lr 1", ("prog",)),
    ],
)
def test_jobs_of_one_script_are_of_one_kind(words: str, kind: tuple[str, ...]) -> None:
    """Arguments after the script do not count."""
    assert up_to_script(words.split()) == kind


def test_at_most_is_a_number_of_places_or_auto() -> None:
    """What is no such number is refused."""
    assert not parse_at_most("3").by_memory
    assert parse_at_most("3").jobs == 3
    assert parse_at_most("auto").by_memory
    for text in ("0", "65", "-1", "x", "1.5", "²"):
        with pytest.raises(ConfigError, match="give a whole number from 1 to 64, or auto"):
            parse_at_most(text)


# -- jobs' files -----------------------------------------------------------------------------------


def test_a_jobs_file_gives_names_commands_and_parameters(tmp_path: Path) -> None:
    """A job without a command has the file's, one without a name is named after its parameters."""
    path = tmp_path / "jobs.json"
    job = {"name": "base", "command": "python other.py"}
    path.write_text(
        json.dumps({"command": "python a.py {lr} {on}", "jobs": [job, {"parameters": {"lr": 0.1, "on": True}}]})
    )
    first, second = read_jobs_file(path)
    assert (first.name, first.owner, first.argv) == ("base", "base", ("python", "other.py"))
    assert (second.name, second.argv) == ("lr=0.1,on=true", ("python", "a.py", "0.1", "true"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"jobs": [{"comand": "a"}]}', "unknown field `comand`"),
        ('{"jobs": [{"command": "a"}], "at": 1}', "unknown field `at`"),
        ('{"jobs": []}', "there are no jobs in it"),
        ('{"jobs": [{}]}', "job 1: has no command"),
        ('{"jobs": [{"name": "a", "command": "a"}, {"name": "a", "command": "b"}]}', "2 jobs are named 'a'"),
        ('{"jobs": [{"name": "a b", "command": "a"}]}', "'a b' is not a job name"),
        ('{"jobs": [{"command": "a {x}"}]}', "not among the names of its parameters (none)"),
        ('{"jobs": [{"command": "a", "parameters": {"x": 1}}]}', "does not use 'x'"),
        ("[", "give {"),
        ("\xff", "give {"),
    ],
)
def test_a_jobs_file_that_cannot_be_is_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    """The sentence names the file, and says what to give."""
    path = tmp_path / "jobs.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as found:
        read_jobs_file(path)
    assert said in str(found.value)
    assert str(path) in str(found.value)


# -- a sweep's file --------------------------------------------------------------------------------


def begun(path: Path, *names: str) -> SweepFile:
    """Return the new file of a sweep with jobs of these names."""
    jobs = tuple(SweepJob(name, ("true",), owner=name) for name in names)
    return SweepFile.create(path, Sweep(directory="/", words=(), jobs=jobs))


def test_what_has_ended_is_not_left_and_a_torn_line_counts_as_not_there(tmp_path: Path) -> None:
    """After a torn line the next one is whole again; a try that is to be repeated leaves its job."""
    path = tmp_path / "s.jsonl"
    with begun(path, "a", "b", "c") as file:
        file.add(JobResult(name="b", exit_code=1))
        file.add(JobResult(name="c", exit_code=1, ran_out_of_memory=True, again=True))
    with path.open("a") as torn:
        torn.write('{"name":"a","exit_co')
    with SweepFile.resume(path) as file:
        assert [job.name for job in file.left] == ["a", "c"]
        file.add(JobResult(name="a", exit_code=0))
    with SweepFile.resume(path) as file:
        assert [job.name for job in file.left] == ["c"]
        assert file.results["a"].exit_code == 0


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    """A second sweep of the same name gets a file of its own."""
    sweep = Sweep(directory="/", words=(), jobs=())
    for name in ("s.sweep.jsonl", "s-2.sweep.jsonl"):
        with SweepFile.create_numbered(tmp_path, "s", sweep) as file:
            assert file.path == tmp_path / name
    with pytest.raises(FileExistsError):
        SweepFile.create(tmp_path / "s.sweep.jsonl", sweep)


def test_two_runs_cannot_have_one_file(tmp_path: Path) -> None:
    """The second is told that it is in use."""
    with begun(tmp_path / "s", "a"), pytest.raises(ConfigError, match="in use by another zico run"):
        SweepFile.resume(tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: "", "is no sweep's file"),
        (lambda text: "{}\n" + text, "is no sweep's file"),
        (lambda text: text.replace("zico.sweep.v1", "zico.sweep.v9"), "is 'zico.sweep.v9'"),
        (lambda text: text + "{]\n", "line 2 is damaged"),
        (lambda text: text + '{"name":"z","exit_code":0}\n', "the sweep has no job 'z'"),
    ],
)
def test_a_file_that_is_none_is_refused_and_unchanged(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    """One sentence says why, and the file stays as it is."""
    path = tmp_path / "s"
    begun(path, "a").__exit__(None, None, None)
    path.write_text(text := change(path.read_text()))
    with pytest.raises(ConfigError, match=said):
        SweepFile.resume(path)
    assert path.read_text() == text


# -- the queue -------------------------------------------------------------------------------------


class Script:
    """Room that answers as it is told, and keeps what it was asked."""

    def __init__(self, answers: str) -> None:
        """Give these: ``y`` or ``n`` each time."""
        self.answers = list(answers)
        self.asked: list[tuple[str, list[str]]] = []
        self.told: list[tuple[str, int, int]] = []

    async def offers(self, candidate: SweepJob, pools: Mapping[int, PoolNow]) -> Mapping[int, Offer]:
        """Give the next answer, for the only pool."""
        (pool,) = pools.values()
        self.asked.append((candidate.name, [job.name for job in pool.running]))
        return {0: Offer(pool.budget_bytes, may_start=self.answers.pop(0) == "y")}

    def ended(self, job: SweepJob, number: int, figures: JobFigures) -> None:
        """Keep which job has ended, where, and how."""
        self.told.append((job.name, number, figures.exit_code))


def queue_of(
    names: Sequence[str], at_most: int, room: Script | Unlimited | None = None, **earlier: JobResult
) -> tuple[Queue, list]:
    """Return a queue of jobs of these names, and the list of the results that it tells."""
    told: list[JobResult] = []
    jobs = [SweepJob(name, ("true",), owner=name) for name in names]
    owners = {"a": Command("a", (), "", Share(weight=2))}
    made = Queue(jobs, earlier, at_most=at_most, room=room or Unlimited(), owners=owners, ended=told.append)
    return made, told


def start(queue: Queue) -> list[str]:
    """Return the names of all that the queue lets start now."""
    names = []
    pools = {0: PoolNow(1, 1, lambda: None)}
    while (found := asyncio.run(queue.next(pools))) is not None:
        names.append(found[0].name)
    return names


def end(queue: Queue, name: str, code: int = 0, *, told: bool = False, refused: bool = False) -> None:
    """Let a job end."""
    oom = RefusedRequest(1, 2) if refused else None
    figures = JobFigures(name=name, command="true", exit_code=code, wall_s=1.0, oom=oom)
    queue.ended(figures, told_out_of_memory=told)


def test_at_most_so_many_run_in_their_order() -> None:
    """The next one starts when one has ended."""
    queue, told = queue_of("abcd", 2)
    assert start(queue) == ["a", "b"]
    end(queue, "b", 3)
    assert start(queue) == ["c"]
    end(queue, "a")
    end(queue, "c")
    assert (start(queue), queue.left) == (["d"], 0)
    assert [(result.name, result.exit_code, result.tries) for result in told] == [("b", 3, 1), ("a", 0, 1), ("c", 0, 1)]


def test_room_is_asked_for_each_but_the_first_and_no_later_job_overtakes() -> None:
    """With nothing running the next job always starts, so a sweep comes to its end."""
    room = Script("nyn")
    queue, _ = queue_of("abc", 3, room)
    assert start(queue) == ["a"]
    assert start(queue) == ["b"]
    end(queue, "a")
    end(queue, "b")
    assert start(queue) == ["c"]
    assert room.asked == [("b", ["a"]), ("b", ["a"]), ("c", ["a", "b"])]
    assert room.told == [("a", 0, 0), ("b", 0, 0)]


@pytest.mark.parametrize("how", [{"told": True}, {"refused": True}])
def test_after_out_of_memory_a_job_runs_again_alone_after_all_others_and_once(how: dict[str, bool]) -> None:
    """Nothing starts beside it, and a second time is the end."""
    queue, told = queue_of("abc", 2)
    assert start(queue) == ["a", "b"]
    end(queue, "a", 1, **how)
    end(queue, "b", 1, **how)
    assert start(queue) == ["c"]
    assert start(queue) == []
    end(queue, "c")
    assert start(queue) == ["a+again"]
    end(queue, "a+again", 1, **how)
    assert start(queue) == ["b+again"]
    end(queue, "b+again")
    assert start(queue) == []
    last = [(result.name, result.tries, result.alone, result.again, result.ran_out_of_memory) for result in told[-2:]]
    assert last == [("a", 2, True, False, True), ("b", 2, True, False, False)]


def test_a_job_that_ends_well_after_a_refusal_is_not_tried_again() -> None:
    """Scripts that look for the largest batch catch the error."""
    queue, told = queue_of("a", 1)
    start(queue)
    end(queue, "a", 0, told=True, refused=True)
    assert (start(queue), told[0].ran_out_of_memory) == ([], False)


def test_a_second_try_is_alone_after_a_resume_too() -> None:
    """The file says that it was to be tried again, and how often it was tried."""
    queue, told = queue_of("ab", 2, a=JobResult(name="a", exit_code=1, again=True))
    assert start(queue) == ["b"]
    end(queue, "b")
    assert start(queue) == ["a+again"]
    end(queue, "a+again")
    assert told[-1].tries == 2


def test_a_name_that_others_have_gets_a_number() -> None:
    """Also one that others' second processes have; results and a second try are still of the job."""
    room = Script("y")
    queue, told = queue_of(["a", "a-2", "b"], 3, room)
    pools = {0: PoolNow(1, 1, lambda: None, taken=frozenset({"a", "a-3.2", "a+again"}))}
    command, _ = asyncio.run(queue.next(pools)) or pytest.fail("nothing starts")
    assert command.name == "a-4", "a-2 is a job of the sweep"
    asyncio.run(queue.next(pools))
    assert room.asked == [("a-2", ["a-4"])], "room knows it as the pool does"
    end(queue, "a-4", 1, told=True)
    end(queue, "a-2")
    room.answers += "y"
    end(queue, (asyncio.run(queue.next(pools)) or pytest.fail("b does not start"))[0].name)
    command, _ = asyncio.run(queue.next(pools)) or pytest.fail("no second try")
    assert command.name == "a+again-2"
    end(queue, command.name)
    assert [(one.name, one.tries, one.alone) for one in told if one.name == "a"] == [("a", 1, False), ("a", 2, True)]


def test_jobs_have_the_share_of_their_command() -> None:
    """Others have the usual one."""
    queue, _ = queue_of("ab", 2)
    found = [asyncio.run(queue.next({0: PoolNow(1, 1, lambda: None)})) for _ in range(2)]
    assert [command.share.weight for command, _ in filter(None, found)] == [2.0, 1.0]


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried ...",
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node __wrapped__MatMul}}",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1. TiB\nMemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_frameworks_words_for_out_of_memory_are_known(line: str) -> None:
    """On standard error only: a table of results may have such a word."""
    lines = line.encode().splitlines()
    assert tells_out_of_memory(Stream.STDERR, lines)
    assert not tells_out_of_memory(Stream.STDOUT, lines)
    assert not tells_out_of_memory(Stream.STDERR, [b"ValueError: memory"])


BAD_WORDS = {
    "a NUL": ("a\0b", "has a NUL"),
    "a long word": ("x" * (1 << 17), "131072 bytes, and a word of a command at most 131071"),
    "a surrogate": ("\ud800", "truncated|is no sweep's file"),
}


@pytest.mark.parametrize(("word", "said"), BAD_WORDS.values(), ids=BAD_WORDS.keys())
def test_words_that_no_command_can_have_are_refused_when_files_are_read(word: str, said: str, tmp_path: Path) -> None:
    """A jobs' file and a sweep's file name the job; nothing of the sweep has started then."""
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": [{"command": "true"}, {"command": "true {x}", "parameters": {"x": word}}]}))
    with pytest.raises(ConfigError, match=said):
        read_jobs_file(path)
    jobs = [{"name": "a", "argv": ["true"]}, {"name": "b", "argv": ["true", word]}]
    sweep = {"schema_version": "zico.sweep.v1", "directory": "/", "words": [], "jobs": jobs}
    path.write_text(json.dumps(sweep) + "\n")
    with pytest.raises(ConfigError, match=said):
        SweepFile.resume(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000], ids=["lists", "objects", "digits"])
def test_deep_files_and_endless_numbers_are_refused_in_a_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs' files, sweeps' files, simulate's files and settings end in no traceback, whatever they hold."""
    path = tmp_path / "file"
    for content in (text, f'{{"jobs": {text}', f'{{"jobs": [{{"name": {text}', f'{{"jobs": [{{"weight": {text}}}]}}'):
        path.write_text(content + "\n")
        for read in (read_jobs_file, SweepFile.resume, lambda path: read_jobs(path.read_bytes(), "file", path.parent)):
            with pytest.raises(ConfigError):
                read(path)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
    path.write_text(f"budget = {text}")
    assert main(["run", "--", "true"]) == 2
    assert f"the settings file {path} is n" in capsys.readouterr().err  # not TOML, or nested too deeply


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "x=1", "--jobs-file", "f", "true"], "--jobs-file and --grid are both given"),
        (["--jobs-file", "f", "true"], "--jobs-file and a command are both given"),
        (["--resume", "f", "--grid", "x=1"], "--resume and --grid are both given"),
        (["--resume", "f", "--", "true"], "--resume and a command are both given"),
        (["--resume", "none"], "the sweep's file none cannot be used (no such file or directory)"),
        (["--at-most", "0", "true"], "--at-most '0'"),
        (["--grid", "x=1", "--weight", "other=2", "prog {x}"], "other"),
    ],
)
def test_what_contradicts_itself_is_one_sentence_and_leaves_no_file(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything starts."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
