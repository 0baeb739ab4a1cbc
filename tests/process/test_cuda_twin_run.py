"""``zico run --device cuda:N``, each of its processes with the driver's software twin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun, descendants, is_alive, python, survivors
from process.support import fake_mps
from process.support.cuda_twin import PATIENCE_S, compile_once, environment, nvml

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB, GIB = 1 << 20, 1 << 30
ON_GPU = ("--device", "cuda:0", "--region", "2MiB", "--name", "a")
SHOW = "import os; [print(name, os.environ.get(name), flush=True) for name in {names}]"
FOREVER = "import signal; print('here', flush=True); signal.pause()"
DEAF = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid(), flush=True); "
DEAF += "signal.pause()"


@pytest.fixture
def twin(tmp_path: Path) -> dict[str, str]:
    """Give variables for processes on a machine with one GPU of 256 MiB."""
    return environment(tmp_path / "site", total_bytes=256 * MIB)


@pytest.fixture
def notes(tmp_path: Path, twin: dict[str, str]) -> Iterator[Path]:
    """Put a control program of MPS on PATH; give its daemon's notes. The daemon must be dead afterwards."""
    made = fake_mps.install(tmp_path / "bin")
    twin["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    yield made
    assert survivors([daemon_pid(made)], timeout_s=0) == []


def daemon_pid(notes: Path) -> int:
    """Return the daemon's process number."""
    return int(notes.read_text().split()[1])


def test_the_command_is_the_same_on_a_gpu(twin: dict[str, str]) -> None:
    """A run on a GPU ends as one on the host does, says how its jobs share the GPU, and its report names the device."""
    with ZicoRun(*ON_GPU, "--json", "-", python("print('trained')"), **twin) as run:
        assert run.finish() == 0, run.stderr
        assert "a | trained" in run.stderr
        report = json.loads(run.stdout)
        assert run.leftovers == []
    assert (report["device"], report["budget_bytes"], report["pool"]["region_bytes"]) == ("cuda:0", 64 * MIB, 2 * MIB)
    assert report["pool"]["peak_physical_bytes"] == 64 * MIB
    assert "context_bytes" not in report["pool"]
    assert "zico: the jobs take turns on the GPU; with --mps their kernels overlap" in run.stderr
    assert "device cuda:0, policy zico" in run.stderr


def test_the_users_daemon_is_named(twin: dict[str, str], tmp_path: Path) -> None:
    """Where the user's own MPS daemon runs, the run says that jobs share the GPU by it."""
    (tmp_path / "control").touch()
    with ZicoRun(*ON_GPU, python("pass"), **twin, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)) as run:
        assert run.finish() == 0, run.stderr
    assert f"jobs share the GPU by the MPS daemon at {tmp_path}" in run.stderr


def test_jobs_see_the_chosen_gpu_alone(tmp_path: Path) -> None:
    """On a machine of several GPUs the jobs' variable names the chosen one by its UUID."""
    twin = environment(tmp_path / "site", devices=3, total_bytes=256 * MIB)
    show = python(SHOW.format(names=["CUDA_VISIBLE_DEVICES"]))
    with ZicoRun(*ON_GPU, "--device", "cuda:2", show, **twin) as run:
        assert run.finish() == 0, run.stderr
    assert "a | CUDA_VISIBLE_DEVICES GPU-02020202-0202-0202-0202-020202020202" in run.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "cuda:3"), "zico: --device: there is no device cuda:3: this process may use 1, cuda:0"),
        (("--device", "cuda", "--save", "gist"), "cannot follow gist on a GPU, where nothing is encoded"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(twin: dict[str, str], options: tuple[str, ...], says: str) -> None:
    """Exit code 2, one line that says what was wrong and what would do, and nothing was started."""
    with ZicoRun(*options, python("print('ran')"), **twin) as run:
        assert run.finish() == 2
        assert run.leftovers == []
    assert says in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_without_a_budget_a_job_has_its_reserve(tmp_path: Path) -> None:
    """Beside all that is free less its reserve a job makes its context and a workspace.

    What becomes of jobs with less is shown in ``test_cli_devices.py``.
    """
    compile_once()
    settings = {"total_bytes": GIB * 4, "context_bytes": 512 * MIB, "attributes": {"COMPUTE_CAPABILITY_MAJOR": 6}}
    twin = environment(tmp_path / "site", nvml(4 * GIB), **settings)
    job = python(TRAIN.format(regions=3) + "print('workspace', int(twin.workspace(512 << 20)[0]))\n")
    options = ("--device", "cuda:0", "--name", "a", "--budget", "none", "--reserve", "1GiB")
    with ZicoRun(*options, job, **twin) as run:
        assert run.finish() == 0, run.stderr
    assert "a | workspace 0" in run.stdout
    assert "budget 3 GiB (--budget), reserve 1 GiB a job (--reserve), jobs 1 (the commands)" in run.stderr


COUNT = """
import atexit
import os
import sys

def note():
    words = " ".join(sys.orig_argv)
    names = {{"zico.broker": "broker", "zico run": "run", "session.attach": "job"}}
    role = next((name for part, name in names.items() if part in words), "other")
    with open({path!r}, "a") as file:
        file.write(f"{{role}} {{bindings.default_api().contexts_made}}\\n")

atexit.register(note)
"""


@pytest.mark.parametrize(("has_library", "needs_context"), [(True, False), (False, True)])
def test_facts_cost_no_context(tmp_path: Path, *, has_library: bool, needs_context: bool) -> None:
    """A job makes its framework's; a broker one if the driver wants it; a run one if no library knows free bytes."""
    compile_once()
    path = tmp_path / "made"
    more = (nvml(256 * MIB) if has_library else "") + COUNT.format(path=str(path))
    settings = {"attributes": {"COMPUTE_CAPABILITY_MAJOR": 6}, "needs_context": needs_context}
    twin = environment(tmp_path / "site", more, total_bytes=256 * MIB, **settings)
    with ZicoRun(*ON_GPU, "--budget", "64MiB", python(TRAIN.format(regions=3)), **twin) as run:
        assert run.finish() == 0, run.stderr
    made = sorted(line for line in path.read_text().splitlines() if not line.startswith("other"))
    assert made == [f"broker {int(needs_context)}", "job 1", f"run {int(not has_library)}"]


def test_a_budget_that_leaves_less_than_the_reserve_has_one_warning(twin: dict[str, str]) -> None:
    """The run goes on, and a quiet one says so too."""
    with ZicoRun(*ON_GPU, "--quiet", python("print('trained')"), **twin) as run:
        assert run.finish() == 0, run.stderr
    assert run.stderr.count("zico: warning: ZICO_BUDGET: 64 MiB leave 192 MiB of the device") == 1
    assert "a | trained" in run.stdout


# -- MPS -------------------------------------------------------------------------------------------


def test_a_private_daemon_serves_the_jobs_and_not_the_broker(twin: dict[str, str], notes: Path) -> None:
    """Jobs get the daemon's directories, the broker does not, and at the end the daemon is told to quit."""
    show = python(SHOW.format(names=["CUDA_MPS_PIPE_DIRECTORY"]) + "; " + FOREVER)
    with ZicoRun(*ON_GPU, "--mps", show, **twin) as run:
        run.read_until("a | here")
        (directory,) = run.leftovers
        assert f"a | CUDA_MPS_PIPE_DIRECTORY {directory}/mps" in run.stdout
        brokers = [pid for pid in descendants(run.process.pid) if b"zico.broker" in words_of(pid, "cmdline")]
        assert len(brokers) == 1
        assert not [word for word in words_of(brokers[0], "environ") if word.startswith(b"CUDA_MPS")]
        assert is_alive(daemon_pid(notes))
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        assert run.leftovers == []
    assert notes.read_text().splitlines()[1:] == ["quit"]
    assert "time-slice" not in run.stderr


def words_of(pid: int, what: str) -> list[bytes]:
    """Return a process's command line or environment."""
    return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")


PERCENTAGE = python(SHOW.format(names=["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]))


def test_a_share_of_a_gpus_processors_is_told_to_mps(twin: dict[str, str], notes: Path) -> None:
    """A job with one has its percentage, whatever the user's variable says; other jobs keep that."""
    users = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80"}
    options = (*ON_GPU, "--name", "b", "--mps", "--compute", "a=29%", "--json", "-")
    with ZicoRun(*options, PERCENTAGE, PERCENTAGE, **twin | users) as run:
        assert run.finish() == 0, run.stderr
        report = json.loads(run.stdout)
    assert "a | CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 29\n" in run.stderr
    assert "b | CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 80\n" in run.stderr
    assert [job["compute"] for job in report["jobs"]] == [0.29, 1.0]
    assert is_alive(daemon_pid(notes)) is False


def test_a_share_of_a_gpus_processors_needs_mps(twin: dict[str, str], tmp_path: Path) -> None:
    """Without it jobs take turns, and one sentence says what would do. The user's own daemon does; all is no share."""
    with ZicoRun(*ON_GPU, "--compute", "a=30%", PERCENTAGE, **twin) as run:
        assert (run.finish(), run.stdout, run.leftovers) == (2, "", [])
    assert run.stderr == (
        "zico: --compute: jobs on cuda:0 take turns, each with all its processors: give --mps, or leave it out\n"
    )
    (tmp_path / "control").touch()
    for share, environ, told in (
        ("30%", {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}, "30"),
        ("100%", {}, "None"),
    ):
        with ZicoRun(*ON_GPU, PERCENTAGE, **twin, **environ, ZICO_COMPUTE=f"a={share}") as run:
            assert run.finish() == 0, run.stderr
        assert f"a | CUDA_MPS_ACTIVE_THREAD_PERCENTAGE {told}\n" in run.stdout


def test_a_run_that_joins_a_broker_starts_no_mps_daemon(twin: dict[str, str], tmp_path: Path) -> None:
    """Jobs of one pool share the GPU alike; one sentence says that the broker has no MPS, to a script, too."""
    notes = fake_mps.install(tmp_path / "bin")
    twin |= {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}

    def broker(*words: str) -> None:
        argv = [sys.executable, "-m", "zico", "broker", *words, "--device", "cuda:0"]
        subprocess.run(argv, env=os.environ | twin, timeout=PATIENCE_S, check=True)

    broker("start", "--budget", "64MiB")
    try:
        show = python(SHOW.format(names=["CUDA_MPS_PIPE_DIRECTORY"]))
        with ZicoRun("--device", "cuda:0", "--name", "a", show, **twin, ZICO_MPS="1") as run:
            assert run.finish() == 0, run.stderr
        script = [sys.executable, "-c", "import zico; zico.join(device='cuda:0')"]
        environ = os.environ | twin | {"ZICO": "on", "ZICO_MPS": "1", "ZICO_BUDGET": "224MiB"}
        told = subprocess.run(script, env=environ, timeout=PATIENCE_S, check=True, capture_output=True, text=True)
    finally:
        broker("stop")
    assert "a | CUDA_MPS_PIPE_DIRECTORY None" in run.stdout
    assert "this run joins the broker of cuda:0, which has mps off and not on (ZICO_MPS): leave that out" in run.stderr
    differs = "budget 64 MiB and not 224 MiB (ZICO_BUDGET), mps off and not on (ZICO_MPS): leave that out"
    assert f"this process joins the broker of cuda:0, which has {differs}" in told.stderr
    assert notes.read_text() == ""


def test_a_broker_without_mps_says_so_where_mps_is_asked_for(twin: dict[str, str], tmp_path: Path) -> None:
    """The daemon of MPS is there before the broker or not at all; a script hears of it from the broker it starts."""
    environ = os.environ | twin | {"XDG_RUNTIME_DIR": str(tmp_path), "ZICO_MPS": "1", "ZICO": "on"}

    def told_by(*words: str) -> str:
        argv = [sys.executable, *words]
        return subprocess.run(argv, env=environ, timeout=PATIENCE_S, check=True, capture_output=True, text=True).stderr

    started = told_by("-m", "zico", "broker", "start", "--device", "cuda:0", "--budget", "64MiB")
    told_by("-m", "zico", "broker", "stop", "--device", "cuda:0")
    script = told_by("-c", "import zico; zico.join('64MiB', 'cuda:0')")
    assert "zico: ZICO_MPS: zico broker starts no MPS daemon: start nvidia-cuda-mps-control -d before" in started
    assert "which has mps off and not on (ZICO_MPS): leave that out" in script


IMPATIENT = "if 'run' in sys.orig_argv:\n    from zico.launch import mps\n    mps.QUIT_S = 0.5\n"
"""A run's own process waits for its daemon's end for less long."""


def test_after_ctrl_c_the_daemon_is_gone(twin: dict[str, str], notes: Path, tmp_path: Path) -> None:
    """An interrupted run ends its daemon too, even one that does not quit when it is told to."""
    fake_mps.install(tmp_path / "bin", "deaf")
    impatient = environment(tmp_path / "impatient", IMPATIENT, total_bytes=256 * MIB)
    with ZicoRun(*ON_GPU, "--mps", python(FOREVER), **twin | impatient) as run:
        run.read_until("a | here")
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, is_alive(daemon_pid(notes)), run.leftovers) == (128 + signal.SIGINT, False, [])


def test_a_killed_run_takes_its_daemon_along(twin: dict[str, str], notes: Path) -> None:
    """After SIGKILL of the run jobs, broker and directory go; the daemon goes last and ends a deaf job's work."""
    with ZicoRun(*ON_GPU, "--mps", python(DEAF), **twin) as run:
        pid = run.number_after("a | pid ")
        server = fake_mps.name_clients(notes, pid)
        below = [*descendants(run.process.pid), daemon_pid(notes)]
        run.process.kill()
        run.process.wait(timeout=10)
        assert survivors(below, timeout_s=15) == []
        assert run.leftovers == []
    assert notes.read_text().splitlines()[1:] == [f"terminate_client {server} {pid} lives"]


# -- sessions --------------------------------------------------------------------------------------


def test_an_adapter_for_host_memory_does_not_join_a_gpus_pool(twin: dict[str, str]) -> None:
    """An adapter that asks for the host is told where the pool is, keeps no descriptor, and the job goes on."""
    code = (
        "import os\nfrom zico.job import session\nfrom zico.base.errors import HookError\n"
        "print('kind', session.pool_kind(), flush=True)\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try:\n    session.attach('torch')\n"
        "except HookError as error:\n    print(error, flush=True)\n"
        "print('kept', len(os.listdir('/proc/self/fd')) - before)\n"
    )
    with ZicoRun(*ON_GPU, python(code), **twin) as run:
        assert run.finish() == 0, run.stderr
    assert "a | kind cuda\n" in run.stdout
    assert (
        "the pool is on cuda:0, and what Zico has for torch here shares the memory of host devices only" in run.stdout
    )
    assert "a | kept 0" in run.stdout


TRAIN = """
from zico.job import session
from zico.device.cuda import bindings
from zico.heap.cuda import on_stream
joined = session.attach("trainer", kind="cuda")
twin = bindings.default_api()
twin.cuCtxSetCurrent(twin.cuDevicePrimaryCtxRetain(0)[1])
stream = int(twin.cuStreamCreate(1)[1])
heap = joined.heap.record[0]
for value in range(1, 6):
    held = [on_stream.allocate_on(heap, 2 << 20, stream) for _ in range({regions})]
    for address in held:
        assert int(twin.cuMemsetD8Async(address, value, 2 << 20, stream)[0]) == 0
    for address in held:
        on_stream.free_on(heap, address, stream)
    session.step()
print(session.status()["device"])
"""


def test_two_jobs_train_on_a_gpu_within_the_budget(tmp_path: Path) -> None:
    """Two jobs whose peaks do not fit together iterate to their ends on one GPU, and the report has their figures."""
    compile_once()
    twin = environment(tmp_path / "site", total_bytes=256 * MIB, attributes={"COMPUTE_CAPABILITY_MAJOR": 6})
    jobs = [python(TRAIN.format(regions=regions)) for regions in (20, 24)]
    options = ("--device", "cuda", "--region", "2MiB", "--budget", "64MiB", "--name", "a", "--name", "b")
    with ZicoRun(*options, "--json", "-", *jobs, **twin) as run:
        assert run.finish() == 0, run.stderr
        report = json.loads(run.stdout)
    assert {"a | cuda:0", "b | cuda:0"} <= set(run.stderr.splitlines())
    assert [job["iterations"] for job in report["jobs"]] == [5, 5]
    assert [job["peak_bytes"] // (2 * MIB) for job in report["jobs"]] == [20, 24]
    assert [job["pool_fraction"] for job in report["jobs"]] == [1.0, 1.0]
    assert report["pool"]["peak_granted_bytes"] <= 64 * MIB
    assert "compiling" not in run.stderr, "all that a broker of a GPU calls is kept on disk"
