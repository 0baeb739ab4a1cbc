"""Ray: one broker for each node and device, work placed by predicted bytes, and processes that join their node's pool.

How it works
    A node tells Ray what its pool has, as custom resources (``node_resources``). ``start`` makes an
    actor for each of them, pinned to its node. The actor starts the node's broker and replaces it
    when it dies (``zico.integrations.ray_actors``).

    Work asks for the bytes that it is predicted to hold. So Ray places it by bytes, in tasks, actors
    and placement groups. What is placed on a node joins that node's pool. Its environment names the
    socket by the node's raylet, whose number Ray puts in where it starts the process.

Known limitations
    * Nodes that join the cluster later have no broker until ``start`` is called again.
    * All nodes have Zico in the same folder, and the same user.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.base.errors import BrokerError, ConfigError
from zico.base.rundir import base_directory
from zico.base.saying import inform
from zico.base.settings import HOST, JOB_VARIABLE, SOCKET_VARIABLE, STARTING_VARIABLE
from zico.base.units import format_bytes, parse_size
from zico.integrations import first_of
from zico.job import joining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TESTED_VERSION = "2.60"
NAMESPACE = "zico"
RAYLET_VARIABLE = "RAY_RAYLET_PID"
STARTING_S = 60
"""Seconds that a process waits for its node's broker, which may be starting."""
MOST_OVERSUBSCRIPTION = 100.0
_PACKAGE = Path(joining.__file__).parent.parent
_BUDGET = "_budget"
_RESOURCE = re.compile(r"zico_(host|cuda_\d{1,4})")

ray = first_of(("ray",), "Ray", "zico-memory[ray]")
if not f"{ray.__version__}.".startswith(f"{TESTED_VERSION}."):
    inform(
        f"Ray {ray.__version__} is not what this was tested with ({TESTED_VERSION}): if it does not work, "
        f"pip install 'ray=={TESTED_VERSION}.*'"
    )


@dataclasses.dataclass(frozen=True)
class NodePool:
    """The pool of one device of one node."""

    node: str
    """By which Ray knows the node."""
    device: str
    budget_bytes: int
    jobs: int
    """How many processes are in the pool."""
    granted_bytes: int
    """What they hold."""


# -- what nodes have, and what work asks for -------------------------------------------------------


def resource_of(device: str) -> str:
    """Return the custom resource by which Ray counts predicted bytes of a device: ``zico_host``, ``zico_cuda_0``.

    Raises:
        ConfigError: It is no device's name.
    """
    name = "zico_" + device.replace(":", "_")
    if not _RESOURCE.fullmatch(name):
        raise ConfigError(f"{device!r} is not a device: give host or cuda:N, where N counts from 0")
    return name


def node_resources(budget: str, device: str = HOST, oversubscription: float = 1.0) -> dict[str, int]:
    """Return the custom resources of a node whose pool has that budget, for ``ray start --resources``.

    Args:
        budget: What all jobs on the device may hold together: ``20GiB``.
        device: ``host`` or ``cuda:N``.
        oversubscription: How many times the budget Ray may hand out as predicted bytes. Above 1,
            peaks that do not meet share memory, and jobs wait where they do.

    Raises:
        ConfigError: A value cannot be used.
    """
    if not 1 <= oversubscription <= MOST_OVERSUBSCRIPTION:
        raise ConfigError(f"oversubscription is {oversubscription}: give a number from 1 to {MOST_OVERSUBSCRIPTION:g}")
    budget_bytes = _size(budget, "budget")
    name = resource_of(device)
    return {name: round(budget_bytes * oversubscription), name + _BUDGET: budget_bytes}


def resources(memory: str | int | Path, device: str = HOST) -> dict[str, int]:
    """Return the custom resource of work that is predicted to hold so many bytes at most.

    It goes where Ray takes resources: ``resources_per_worker`` of ``ScalingConfig``, a bundle of a
    placement group.

    Args:
        memory: ``6GiB``, or bytes: the peak that ``peak``, ``zico fit`` or an earlier run has
            told. Or the ``Path`` of a trace, as ``zico trace show`` reads it: the peak of an iteration.
        device: ``host`` or ``cuda:N``.

    Raises:
        ConfigError: No node that lives has the device, or none has so much.
        TraceError: The trace cannot be used; the message says why.
    """
    name = resource_of(device)
    wanted = _peak_in(memory) if isinstance(memory, Path) else _size(memory, "memory")
    offered = [int(node["Resources"][name]) for node in _nodes() if name in node["Resources"]]
    if not offered:
        raise ConfigError(
            f"no node of the cluster has a pool on {device}: start one with what node_resources returns, as in "
            f"ray start --resources '{json.dumps(node_resources('8GiB', device))}'"
        )
    if wanted > max(offered):
        raise ConfigError(
            f"memory is {format_bytes(wanted)}, more than the {format_bytes(max(offered))} that any node offers on "
            f"{device}: give less, or a node with more"
        )
    return {name: wanted}


def environment(device: str = HOST, name: str = "") -> dict[str, Any]:
    """Return the ``runtime_env`` with which Python processes join the pool of the node that they are on.

    Args:
        device: ``host`` or ``cuda:N``.
        name: What the jobs are called; by default ``default_worker``, as Ray's own script.
    """
    resource_of(device)
    entries = [str(_PACKAGE / "job" / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        SOCKET_VARIABLE: str(socket_on(base_directory(), f"${{{RAYLET_VARIABLE}}}", device)),
        STARTING_VARIABLE: str(STARTING_S),
        "ZICO_PACKAGE_PATH": str(_PACKAGE.parent),
        "PYTHONPATH": os.pathsep.join(entries),
    }
    return {"env_vars": variables | ({JOB_VARIABLE: name} if name else {})}


def remote_options(memory: str | int | Path, device: str = HOST, name: str = "") -> dict[str, Any]:
    """Return options of a task or actor that is placed by predicted bytes, and joins its node's pool.

    For ``f.options(**remote_options("6GiB"))`` and ``ray.remote(**remote_options("6GiB"))``.

    Args:
        memory: As for ``resources``.
        device: ``host`` or ``cuda:N``.
        name: As for ``environment``.

    Raises:
        ConfigError, TraceError: As ``resources``.
    """
    return {"resources": resources(memory, device), "runtime_env": environment(device, name)}


def trainable(
    function: Callable[..., Any], memory: str | int | Path, device: str = HOST, cpus: float = 1, name: str = ""
) -> Any:  # noqa: ANN401 - what Tune makes of it
    """Return a function trainable of ``ray.tune`` whose trials are packed by predicted bytes.

    The bytes stand in the placement group of each trial. Each trial joins its node's pool before the
    function runs.

    Args:
        function: As Tune takes it.
        memory: As for ``resources``; of one trial.
        device: ``host`` or ``cuda:N``.
        cpus: Of one trial.
        name: As for ``environment``.

    Raises:
        ConfigError, TraceError: As ``resources``.
    """
    from ray import tune

    joins = environment(device, name)["env_vars"]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        _join(joins)
        return function(*args, **kwargs)

    bundle = {"CPU": cpus, **resources(memory, device)}
    return tune.with_resources(run, tune.PlacementGroupFactory([bundle]))


def _join(variables: Mapping[str, str]) -> None:
    """Let this process join, as if it had been started with these variables."""
    mine = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    mine[SOCKET_VARIABLE] = mine[SOCKET_VARIABLE].replace(f"${{{RAYLET_VARIABLE}}}", os.environ[RAYLET_VARIABLE])
    os.environ.update(mine)
    joining.join()


def _size(memory: str | int, what: str) -> int:
    try:
        found = parse_size(memory, whole_bytes=sys.maxsize) if isinstance(memory, str) else memory
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    if found <= 0 or str(memory).strip().endswith("%"):
        raise ConfigError(f"{what} is {memory!r}: give a size, such as 6GiB")
    return found


def _peak_in(trace: Path) -> int:
    """Return the most bytes that are alive at once in an iteration of a trace."""
    from zico.planning.packing.from_trace import iteration_problem
    from zico.trace.files import read_trace

    return iteration_problem(read_trace(trace)).problem.peak_live_bytes


def _nodes() -> list[dict[str, Any]]:
    if not ray.is_initialized():
        raise ConfigError("this process is in no cluster of Ray: call ray.init() first")
    return [node for node in ray.nodes() if node["Alive"]]


# -- brokers ---------------------------------------------------------------------------------------


def socket_on(directory: Path, raylet: str, device: str) -> Path:
    """Return where the broker of a node's device listens; the node is known by its raylet's process."""
    return directory / f"broker-ray-{raylet}-{device.replace(':', '-')}.sock"


def start(**options: str) -> list[NodePool]:
    """Start a broker for each device of each node that ``node_resources`` has told Ray of, where there is none yet.

    Waits until all are ready. The first start on a machine compiles, which takes a minute or two.

    Args:
        options: Of ``zico broker``, with "_" for "-": ``policy="serial"``, ``region="1MiB"``.

    Returns:
        The pools, those that were there already, too.

    Raises:
        ConfigError: This process is in no cluster, or no node has a pool.
        BrokerError: A broker cannot be started; the message says where and why.
    """
    from zico.integrations import ray_actors

    wanted = _wanted()
    if not wanted:
        raise ConfigError(
            "no node of the cluster has a pool: start nodes with what node_resources returns, as in "
            f"ray start --resources '{json.dumps(node_resources('8GiB'))}'"
        )
    told = {name.replace("_", "-"): value for name, value in options.items()}
    ray_actors.gang_order()
    actors = {
        (node, device): ray_actors.broker(node, device, {"budget": f"{budget}B", "device": device, **told})
        for (node, device), budget in wanted.items()
    }
    return [_pool(node, device, actor) for (node, device), actor in actors.items()]


def status() -> list[NodePool]:
    """Return the pools of all nodes that live.

    Raises:
        ConfigError: This process is in no cluster.
        BrokerError: A broker does not answer; the message says where and why.
    """
    from zico.integrations import ray_actors

    found = [(node, device, ray_actors.known_broker(node, device)) for node, device in _wanted()]
    return [_pool(node, device, actor) for node, device, actor in found if actor is not None]


def peak(name: str, device: str = HOST) -> int:
    """Return the most bytes that one process of a job of this name has held so far, on any node that lives.

    For ``resources``, ``remote_options`` and ``trainable`` of the next work of that name. Work that
    has ended counts, too, as long as its node's broker lives.

    Args:
        name: As given to ``environment``, ``remote_options`` or ``trainable``.
        device: ``host`` or ``cuda:N``.

    Raises:
        ConfigError: This process is in no cluster, or no job of that name has held memory.
        BrokerError: A broker does not answer; the message says where and why.
    """
    from zico.integrations import ray_actors

    resource_of(device)
    found = 0
    for node, where in _wanted():
        actor = ray_actors.known_broker(node, where) if where == device else None
        if actor is not None:
            found = max(found, _asked(node, where, actor.peaks).get(name, 0))
    if not found:
        raise ConfigError(
            f"no job named {name!r} has held memory in a pool on {device}: run one first with a size, such as 6GiB, "
            f"and name={name!r}"
        )
    return found


def stop() -> None:
    """End all brokers and their actors. Jobs that run go on with what they have, by claims alone.

    Raises:
        ConfigError: This process is in no cluster.
    """
    from zico.integrations import ray_actors

    ray_actors.end([actor for node, device in _wanted() if (actor := ray_actors.known_broker(node, device))])


def _wanted() -> dict[tuple[str, str], int]:
    """Return the budget of each device of each node."""
    found = {}
    for node in _nodes():
        for name, value in node["Resources"].items():
            if name.endswith(_BUDGET) and (match := _RESOURCE.fullmatch(name.removesuffix(_BUDGET))):
                found[node["NodeID"], match[1].replace("_", ":")] = int(value)
    return found


def _pool(node: str, device: str, actor: Any) -> NodePool:  # noqa: ANN401 - a handle of an actor
    return NodePool(node, device, *_asked(node, device, actor.status))


def _asked(node: str, device: str, method: Any) -> Any:  # noqa: ANN401 - what an actor's method answers
    from zico.integrations.ray_actors import answer

    try:
        return answer(method.remote())
    except (BrokerError, ray.exceptions.RayError) as error:
        reason = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
        raise BrokerError(f"the node {node[:8]} has no pool on {device}: {reason}") from error
