"""A real cluster of two nodes: work is placed by bytes and joins its node's pool; what dies is replaced."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.harness import MIB, PATIENCE_S, clean_environment, compile_once, until

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytest.importorskip("ray.tune", reason="Ray Tune is not installed: make test-ray")

from cpu.support.trace_cases import Loop  # noqa: E402
from ray import cloudpickle  # noqa: E402 - only where there is Ray
from ray.cluster_utils import Cluster  # noqa: E402

from zico.base.errors import BrokerError, ConfigError, TraceError  # noqa: E402
from zico.integrations import ray as integration  # noqa: E402
from zico.integrations import ray_actors  # noqa: E402
from zico.integrations.ray_train import in_gang  # noqa: E402
from zico.trace.events import Kind  # noqa: E402
from zico.trace.files import write_trace  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.timeout(2 * PATIENCE_S), pytest.mark.filterwarnings("default")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
BUDGET = 36
"""MiB on each node. A rank of a gang holds up to 24: two do not fit."""
OFFERED = 3 * BUDGET
ITERATIONS = 6
DEADLINE_S = 120.0


@dataclasses.dataclass
class TwoNodes:
    """A cluster, and where its processes keep their files."""

    cluster: Any
    directory: Path
    node: dict[str, Any]
    """What a node is started with."""
    second: Any = None

    def add(self) -> None:
        """Add the second node, with a pool."""
        self.second = self.cluster.add_node(**self.node)
        integration.start(region="1MiB")

    def brokers(self) -> dict[str, psutil.Process]:
        """Return the brokers that live, by the process of their node's raylet."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "broker" in words and any(word.startswith(str(self.directory)) for word in words):
                found[words[words.index("--until") + 1]] = process
        return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """Start two nodes of two processors with a pool each; in the end nothing of them is left."""
    compile_once()
    directory = Path(tempfile.mkdtemp(prefix="zr-"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ZICO") and "CACHE" not in name]:
            patch.delenv(name)
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        patch.setenv("RAY_TMPDIR", str(directory))
        offers = integration.node_resources(f"{BUDGET}MiB", oversubscription=OFFERED / BUDGET)
        node = {"num_cpus": 4, "resources": offers, "object_store_memory": 80 * MIB}
        cluster = Cluster(initialize_head=True, connect=True, head_node_args=node)
        made = TwoNodes(cluster, directory, node)
        try:
            made.add()
            yield made
            integration.stop()
            assert not made.brokers()
        finally:
            ray.shutdown()
            cluster.shutdown()
            left = made.brokers()
            for process in left.values():
                process.kill()
            shutil.rmtree(directory, ignore_errors=True)
    assert not left


def train(losses: Path, seed: int = 0, go_on: Callable[[], bool] = bool) -> list[str]:
    """Train at least ``ITERATIONS``, and while ``go_on`` says so; return the bits of the first losses."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits: list[str] = []
    while len(bits) < ITERATIONS or go_on():
        optimizer.zero_grad()
        loss = model(torch.randn(8192, 64)).square().mean()
        loss.backward()
        optimizer.step()
        bits.append(loss.item().hex())
        losses.write_text(json.dumps({"bits": bits[:ITERATIONS], "count": len(bits), **place()}))
    return bits[:ITERATIONS]


def place() -> dict[str, Any]:
    """Return what is known of this process: its pool and its node."""
    from zico.job.session import current_here, status

    joined = current_here()
    return {
        "pid": os.getpid(),
        "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
        "peak": (status() or {"peak_bytes": 0})["peak_bytes"],
        "group": int(joined.record["group"]) if joined is not None else None,
    }


@functools.cache
def alone() -> list[str]:
    """Return the losses without a pool."""
    with tempfile.TemporaryDirectory() as directory:
        return train(Path(directory) / "losses")


def said(path: Path) -> dict[str, Any]:
    """Return what a training has written last; nothing while it writes."""
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return read


@pytest.mark.usefixtures("nodes")
def test_work_that_fits_no_node_is_refused() -> None:
    """More than any node offers, a device that no node has, and what is no size: one sentence says what to do."""
    with pytest.raises(ConfigError, match=r"memory is 109 MiB, more than the 108 MiB that any node offers on host"):
        integration.remote_options(f"{OFFERED + 1}MiB")
    with pytest.raises(ConfigError, match=r"no node of the cluster has a pool on cuda:0: start one with .*zico_cuda_0"):
        integration.remote_options("1MiB", device="cuda:0")
    with pytest.raises(ConfigError, match="memory is '50%': give a size, such as 6GiB"):
        integration.resources("50%")


@pytest.mark.usefixtures("nodes")
def test_trials_are_packed_by_bytes(tmp_path: Path) -> None:
    """Four trials of 54 MiB on two nodes that offer 108: two on each, in that node's pool, with the losses of alone."""
    from ray import tune

    def objective(config: dict[str, Any]) -> dict[str, Any]:
        mine = tmp_path / f"trial-{config['number']}"

        def others_are_missing() -> bool:
            return len(list(tmp_path.glob("trial-*"))) < 4

        return {"bits": train(mine, go_on=others_are_missing), **said(mine)}

    tuner = tune.Tuner(
        integration.trainable(objective, memory=f"{OFFERED // 2}MiB", cpus=1, name="trial"),
        param_space={"number": tune.grid_search([0, 1, 2, 3])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    found = [result.metrics for result in results]
    assert [one["bits"] for one in found] == [alone()] * 4
    assert all(0 < one["peak"] <= BUDGET * MIB for one in found), [one["peak"] for one in found]
    assert sorted(sum(one["node"] == node for one in found) for node in {one["node"] for one in found}) == [2, 2]
    assert integration.peak("trial") == max(one["peak"] for one in found), "of trials that have ended"
    assert integration.remote_options(integration.peak("trial"))["resources"]["zico_host"] == integration.peak("trial")
    with pytest.raises(ConfigError, match=r"no job named 'other' has held memory in a pool on host: run"):
        integration.peak("other")


@pytest.mark.usefixtures("nodes")
def test_two_distributed_jobs_end_in_pools_that_are_too_small_for_both(tmp_path: Path) -> None:
    """One by Ray Train, one by tasks; the actor that knows their order dies meanwhile. Both have the same losses."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(_config: dict[str, Any]) -> None:
        import torch

        train(tmp_path / f"train-{torch.distributed.get_rank()}", go_on=some_are_missing)

    def some_are_missing() -> bool:
        import torch

        found = [said(tmp_path / f"{job}-{rank}").get("count") for job in ("train", "tasks") for rank in (0, 1)]
        missing = torch.tensor(int(not all(found)))
        torch.distributed.all_reduce(missing)  # all ranks go on, or none
        return bool(missing)

    def rank_of_tasks(rank: int) -> None:
        import torch

        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        in_gang(train)(tmp_path / f"tasks-{rank}", go_on=some_are_missing)
        torch.distributed.destroy_process_group()

    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    task = ray.remote(num_cpus=1, max_retries=0, **integration.remote_options("24MiB", name="tasks"))(rank_of_tasks)
    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    ranks = [task.options(scheduling_strategy=pinned(node, soft=False)).remote(rank) for rank, node in enumerate(ids)]
    trainer = TorchTrainer(
        in_gang(loop),
        train_loop_config={},
        scaling_config=ScalingConfig(
            num_workers=2,
            resources_per_worker={"CPU": 1, **integration.resources("24MiB")},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            storage_path=str(tmp_path / "results"), worker_runtime_env=integration.environment(name="train")
        ),
    )
    fitting = threading.Thread(target=trainer.fit, daemon=True)
    fitting.start()
    until(lambda: said(tmp_path / "tasks-0").get("count"), DEADLINE_S, "the tasks train")
    order = ray.get_actor(ray_actors.ORDER_NAME, integration.NAMESPACE)
    until(lambda: ray.get(order.inside.remote(), timeout=DEADLINE_S), DEADLINE_S, "a gang has its turn")
    ray.kill(order, no_restart=False)
    ray.get(ranks, timeout=DEADLINE_S)
    fitting.join(DEADLINE_S)
    assert not fitting.is_alive()
    figures = {job: [said(tmp_path / f"{job}-{rank}") for rank in (0, 1)] for job in ("train", "tasks")}
    assert [one["bits"] for one in figures["train"]] == [one["bits"] for one in figures["tasks"]]
    for ranks_of in figures.values():
        assert len({one["node"] for one in ranks_of}) == 2
        assert len({one["group"] for one in ranks_of} - {0, None}) == 1
        assert all(BUDGET * MIB / 2 < one["peak"] <= BUDGET * MIB for one in ranks_of)
    until(lambda: not ray.get(order.inside.remote(), timeout=DEADLINE_S), DEADLINE_S, "nobody is inside")


def test_what_dies_is_replaced_and_work_trains_on(nodes: TwoNodes, tmp_path: Path) -> None:
    """The actor that keeps a broker, then the broker, then the node: Ray starts the work again, in a pool."""
    path, enough = tmp_path / "losses", tmp_path / "enough"

    def task() -> list[str]:
        return train(path, go_on=lambda: not enough.exists())

    second = nodes.second.node_id
    options = integration.remote_options("24MiB", name="task")
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(second, soft=True)
    result = ray.remote(num_cpus=1, max_retries=5, scheduling_strategy=pinned, **options)(task).remote()

    def trains_anew(old: int) -> dict[str, Any]:
        return until(lambda: (now := said(path)).get("pid", old) != old and now, DEADLINE_S, "the task trains")

    first = trains_anew(0)
    assert first["node"] == second
    (raylet,) = [name for name in nodes.brokers() if psutil.Process(first["pid"]).ppid() == int(name)]
    broker = nodes.brokers()[raylet]

    keeper = ray_actors.known_broker(second, "host")
    (kept_by,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if "BrokerActor" in " ".join(one.info["cmdline"] or []) and one.ppid() == int(raylet)
    ]
    kept_by.kill()
    until(lambda: not kept_by.is_running(), DEADLINE_S, "the actor has died")
    assert ray.get(keeper.status.remote(), timeout=DEADLINE_S)[1] >= 1
    assert nodes.brokers()[raylet].pid == broker.pid
    count = said(path).get("count", 0)
    until(lambda: said(path).get("count", 0) > count, DEADLINE_S, "the task has gone on")
    assert said(path)["pid"] == first["pid"]

    broker.send_signal(signal.SIGKILL)
    again = trains_anew(first["pid"])
    assert again["node"] == second
    assert not psutil.pid_exists(first["pid"]) or psutil.Process(first["pid"]).status() == psutil.STATUS_ZOMBIE
    assert nodes.brokers()[raylet].pid != broker.pid
    assert again["peak"] > 0

    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    last = trains_anew(again["pid"])
    assert last["node"] != second
    assert last["peak"] > 0
    until(lambda: raylet not in nodes.brokers(), DEADLINE_S, "the broker of the dead node has ended")
    enough.touch()
    assert ray.get(result, timeout=DEADLINE_S) == alone()
    assert len(integration.status()) == 1
    nodes.add()  # for other tests, in whatever order they come


def test_a_node_without_the_device_is_named(nodes: TwoNodes) -> None:
    """A node that says that it has a GPU, and has none: the error has the broker's reason."""
    node = nodes.cluster.add_node(num_cpus=1, resources=integration.node_resources("1GiB", device="cuda:0"))
    with pytest.raises(
        BrokerError, match=rf"the node {node.node_id[:8]} has no pool on cuda:0: .*the broker could not"
    ):
        integration.start(region="1MiB")
    nodes.cluster.remove_node(node)


def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """In a cluster of its own; all four tasks have ended, in one pool."""
    script = tmp_path / "script.py"
    script.write_text(re.split("^```.*$", PAGE.read_text(), flags=re.MULTILINE)[1])
    with tempfile.TemporaryDirectory(prefix="zr-") as directory:  # elsewhere, Ray might find a cluster that is there
        environment = clean_environment() | {"RAY_TMPDIR": directory}
        environment.pop("ZICO", None)
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 0, done.stderr
    losses, pools = map(json.loads, done.stdout.strip().splitlines()[-2:])
    assert len(set(losses)) == 4
    assert [(pool["device"], pool["budget_bytes"]) for pool in pools] == [("host", 256 * MIB)]
    assert pools[0]["jobs"] >= 1


def test_a_trace_tells_the_size_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of an iteration, without a cluster; a path that holds no such thing is refused with a sentence."""
    nodes = [{"NodeID": "n", "Resources": {"zico_host": 64 * MIB}}]
    monkeypatch.setattr(integration, "_nodes", lambda: nodes)
    loop = Loop()
    loop.allocate(5 * MIB)
    for iteration in range(4):
        loop.event(Kind.BEGIN, iteration)
        loop.free(loop.allocate(3 * MIB))
        loop.free(loop.allocate(8 * MIB))
    write_trace(tmp_path / "loop.zst", loop.trace())
    assert integration.remote_options(tmp_path / "loop.zst")["resources"] == {"zico_host": 13 * MIB}
    nodes[0]["Resources"]["zico_host"] = 12 * MIB
    with pytest.raises(ConfigError, match="memory is 13 MiB, more than the 12 MiB that any node offers"):
        integration.resources(tmp_path / "loop.zst")
    with pytest.raises(TraceError, match=r"missing.zst: cannot be read"):
        integration.resources(tmp_path / "missing.zst")


def test_without_a_pool_or_a_cluster_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is missing, and what to do; sizes and devices are looked at without a cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"in no cluster of Ray: call ray.init\(\) first"):
        integration.start()
    monkeypatch.setattr(integration, "_nodes", lambda: [{"NodeID": "n", "Resources": {"CPU": 1.0}}])
    with pytest.raises(ConfigError, match=r"no node of the cluster has a pool: start nodes with .* --resources"):
        integration.start()
    with pytest.raises(ConfigError, match="'gpu' is not a device: give host or cuda:N"):
        integration.node_resources("1GiB", device="gpu")
    with pytest.raises(ConfigError, match=r"oversubscription is 0.5: give a number from 1 to 100"):
        integration.node_resources("1GiB", oversubscription=0.5)
