"""A process's membership in a pool: joined when a framework is imported, left when the process ends.

Loads no Numba and no framework by being imported; ``attach`` does, when an adapter calls it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError, HookError
from zico.base.saying import inform
from zico.base.settings import SOCKET_VARIABLE, STARTING_VARIABLE, kind_of, starting_s
from zico.job.autoload import complain, framework_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from zico.base.errors import OutOfMemory
    from zico.broker.client import Membership
    from zico.heap.build import Heap
    from zico.job.device_timeline import DeviceTimeline
    from zico.job.frozen import Sharer, Sharing
    from zico.job.settings import JobSettings
    from zico.job.status import JobStatus
    from zico.pool.table import PoolTable

OWNER_VARIABLE = "ZICO_OWNER_PID"
"""The process that is the job; its descendants stay out of the pool."""

LAUNCHERS = frozenset(
    (
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("accelerate", "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "deepspeed"),
    )
)
"""Programs and modules that import a framework only to start the processes that train."""

GRACE_ALLOCATIONS = 1 << 14
"""Allocations of tensors over the threshold: ten iterations of a ResNet-110, or one of eight micro-batches."""

_LOOK_S = 0.005

HOOKED_FUNCTIONS = ("posix_memalign", "aligned_alloc", "free")


class Watcher:
    """Takes part in what happens to a session; a subclass says in what."""

    def before_boundary(self) -> None:
        """Do what is due before an iteration is ended, in the thread that marks it."""

    def at_boundary(self) -> None:
        """Do what is due when an iteration has been admitted, in the thread that marked it."""

    def end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - as torch's hooks
        """Note a finished step, and its arguments, of a library that steps optimizers in parts."""

    def begins_to_save(self, lacks: str) -> bool:  # noqa: ARG002 - for who does
        """Have the job save memory, and tell whether it does; ``lacks`` is what it lacks, as people read it."""
        return False


class Session:
    """This process's place in a pool, its heap, and the marks of its iterations."""

    def __init__(
        self,
        membership: Membership,
        pool: PoolTable,
        heap: Heap,
        settings: JobSettings,
        timeline: DeviceTimeline | None = None,
    ) -> None:
        """Own what has been set up; use ``attach``."""
        self.membership = membership
        self.pool = pool
        self.heap = heap
        self.settings = settings
        self.timeline = timeline
        self.frameworks: list[str] = []
        self.swapper: Any = None
        """What moves idle tensors of this job (``zico.swap.swapper.Swapper``), if anything does."""
        self.sharers: list[Callable[[], Sharer]] = []
        """Each framework's way to hold frozen memory once together with other jobs; on a GPU PyTorch's alone."""
        self.rest: Callable[[], None] | None = None
        """What the job does before each wait at a boundary, such as putting its context aside; ``None``: nothing."""
        self.watchers: list[Watcher] = []
        self.parts: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Optimizers whose steps are such parts, and who offloads their state; empty: nobody but Zico."""
        self.expects_marks = False
        """An adapter is going to mark iterations where optimizers or training steps tell it to."""
        self.differentiated = False
        """Gradients have been computed since the last mark; an adapter whose updates tell nothing else sets it."""
        self._main: weakref.ref[Any] | None = None
        self._others: list[weakref.ref[Any]] = []
        """Parts that have stepped since the main one did."""
        self._whole = 0
        self._explicit = False
        self._is_marked = False
        self._has_left = False

    @property
    def record(self) -> Any:  # noqa: ANN401 - one JOB record
        """Return this job's record in the shared table."""
        return self.pool.jobs[self.membership.job]

    def redirect(self, library_prefix: str, names: tuple[str, ...]) -> None:
        """Let a loaded library take large tensors from the pool; the rest goes where it went before.

        Args:
            library_prefix: How the library's file name begins.
            names: Which of ``HOOKED_FUNCTIONS`` it imports.

        Raises:
            HookError: The library is not loaded or imports none of them, or the pool is not the
                host's memory; nothing has been changed.
        """
        if self.membership.device.kind != "host":
            raise HookError(f"{library_prefix} takes memory of the host, and the pool is on {self.device}")
        from zico.heap import hooks
        from zico.job import elf

        addresses = {name: int(getattr(hooks, name).address) for name in names}
        hooked = elf.replace_imports(elf.find_loaded(library_prefix), addresses)
        ours = {int(getattr(hooks, name).address) for name in HOOKED_FUNCTIONS}
        heap = self.heap.record[0]
        for name, original in hooked.originals.items():
            if original not in ours:
                heap[f"real_{name}"] = original

    @functools.cached_property
    def frozen(self) -> Sharing:
        """What this process has in common with other jobs, whatever the framework."""
        if self.membership.device.kind != "host":
            from zico.job.frozen_device import DeviceSharing

            return DeviceSharing(self)
        from zico.job.frozen import Sharing

        return Sharing(self)

    def shares_by(self, make: Callable[[Session], Sharer], *, on_gpu: bool = False) -> None:
        """Let a framework's frozen memory be held once: by itself where the job is to, else when it asks for it.

        Args:
            make: Makes what does it, when it is first needed.
            on_gpu: Whether that knows memory of a GPU.
        """
        if self.membership.device.kind != "host" and not on_gpu:
            return

        @functools.cache
        def sharer() -> Sharer:
            self.watchers.append(made := make(self))
            return made

        self.sharers.append(sharer)
        if self.settings.wish.share_frozen:
            sharer().install()

    def expect_marks(self) -> None:
        """Trust no boundary found by repetition for a while: an adapter is going to mark iterations.

        Micro-batches repeat before the first optimizer step does. A program that never steps an
        optimizer that the adapter knows is still found out, only later.
        """
        self.expects_marks = True
        self.heap.record[0]["grace"] = GRACE_ALLOCATIONS

    @property
    def device(self) -> str:
        """Return the name of the device that the pool is on."""
        return self.membership.device.name

    @property
    def is_to_swap(self) -> bool:
        """Tell whether tensors of this job are to leave and come back, if an adapter can see to it."""
        from zico.pool.layout import SaveMode

        return int(self.record["save"]) in (SaveMode.SWAP, SaveMode.AUTO)

    def overflow(self) -> None:
        """Let what exceeds all that the job may hold go to the next tier; until then a thread sleeps."""
        start_fd = os.eventfd(0, os.EFD_CLOEXEC)
        swap = self.heap.record[0]["swap"]
        swap["start_fd"] = start_fd
        threading.Thread(target=self._run_short, args=(start_fd,), name="zico-saving", daemon=True).start()
        swap["overflows"] = 1

    @contextlib.contextmanager
    def refusing_beyond_limit(self) -> Iterator[None]:
        """Refuse what exceeds all that the job may hold, unless the job is to save; as before afterwards."""
        swap = self.heap.record[0]["swap"]
        before = int(swap["overflows"])
        if not self.is_to_swap:
            swap["overflows"] = 0
        try:
            yield
        finally:
            swap["overflows"] = before

    def _run_short(self, start_fd: int) -> None:
        """Await the first tensor that exceeds all; then begin to save memory, or say where such tensors are."""
        os.eventfd_read(start_fd)  # no deadline: nobody waits for this thread
        from zico.swap.joining import HeapGauge

        lacks = f"{self.settings.name} {HeapGauge(self.heap).lacking()}"
        if any(watcher.begins_to_save(lacks) for watcher in self.watchers):
            return
        inform(
            f"{lacks}: from now on what exceeds it lies in the next tier, which is slower; --save page moves what is "
            "needed least, with --save none the job ends out of memory"
        )

    def leave(self) -> None:
        """Take no more memory from the pool and end no more iterations; tensors stay until they are freed.

        At once, whenever the broker hears of it: from now on no tensor is large enough to be the pool's.
        """
        from zico.heap.allocator import LARGEST

        self._has_left = True
        self.heap.record[0]["threshold_bytes"] = LARGEST
        self.membership.leave()

    def detach_fork(self, *, hangs_up: bool) -> None:
        """Leave the pool to the parent: for a forked child, which keeps the connection open or not."""
        from zico.heap.layout import Attached

        self.heap.record[0]["attached"] = Attached.FORKED
        if hangs_up:
            self.membership.leave()

    @property
    def is_member(self) -> bool:
        """Tell whether this process is the one that has joined, and has not left."""
        return not (self._has_left or self.is_parents)

    @property
    def is_unused(self) -> bool:
        """Tell whether this process has taken nothing from the pool and ended no iteration."""
        return not (self.record["requested_bytes"] or self.record["iteration"])

    @property
    def is_parents(self) -> bool:
        """Tell whether this process is a child forked from the one that has joined."""
        return self.membership.owner_pid != os.getpid()

    def let_go_in_child(self) -> None:
        """Make room in a forked child for a session of its own.

        Raises:
            HookError: The parent has had tensors in the pool, or it pages or swaps; nothing has been
                changed.
        """
        parent = self.membership.owner_pid
        if self.heap.paged is not None or self.swapper is not None:
            raise HookError(
                f"this process was forked from process {parent}, which saves memory: start it by the spawn method"
            )
        if not self.is_unused:
            raise HookError(
                f"this process was forked from process {parent}, which has had tensors in the pool: fork before "
                "the first large tensor, or start it by the spawn method"
            )
        self._has_left = True
        self.watchers.clear()
        self.heap.hand_over()

    def refuse_fork(self) -> None:
        """Raise in a forked child where the pool is on a device that a fork cannot use.

        Raises:
            HookError: This is such a child.
        """
        if self.membership.device.kind != "host" and self.is_parents:
            raise HookError(
                f"this process was forked from one that uses {self.device}, and CUDA cannot be used again after a "
                "fork: start processes by the spawn method (multiprocessing.set_start_method)"
            )

    def stepped(self, part: object) -> None:
        """Note that a part of the job has made a step, such as an optimizer; a step of the main part is a mark.

        With several (a GAN's two optimizers) one iteration steps each of them. The first one seen is
        the main one, until it is gone, or another one steps twice without it. Then each step of that
        one is an iteration, the first of the two as well, though no mark has ended it.
        """
        if self._whole:
            return
        self.differentiated = False
        main = self._main() if self._main is not None else None
        if main is not part:
            if main is not None and all(one() is not part for one in self._others):
                self._others.append(weakref.ref(part))
                return
            if main is not None and not self._explicit:
                self.record["parts"] -= 1  # two iterations end with this mark
            self._main = weakref.ref(part)
        self._others.clear()
        self.mark()

    @property
    def is_outside_steps(self) -> bool:
        """Tell whether no optimizer or training step marks iterations, and none is in progress."""
        return not self.expects_marks and not self._whole

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Take what adapters would mark in the body as parts of one step, which the caller marks."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    def mark(self) -> None:
        """End this iteration and begin the next; an adapter's mark, ignored once a user marks by hand."""
        self.differentiated = False
        if not self._explicit and not self._whole:
            self._is_marked = True
            self._boundary()

    def ignore_adapters(self) -> None:
        """Ignore adapters' marks from now on, since the user marks by hand."""
        self._explicit = True

    def step(self) -> None:
        """End this iteration and begin the next; waits until the scheduler admits it."""
        if self._is_marked and not self._explicit:
            self.record["parts"] += 1  # an adapter's mark was within the iteration that ends here
        self.ignore_adapters()
        self._boundary()

    def _boundary(self) -> None:
        from zico.heap import allocator
        from zico.heap.layout import Attached

        heap = self.heap.record[0]
        for watcher in self.watchers:
            watcher.before_boundary()
        if heap["attached"] == Attached.YES and not self._has_left:
            begins = allocator.end_by_mark(heap)
            while not begins:  # handlers of signals run here, and Ctrl-C raises
                if self.rest is not None:
                    self.rest()
                begins = allocator.begin_by_mark(heap)
        for watcher in self.watchers:
            watcher.at_boundary()

    @property
    def lost_status(self) -> int:
        """Return the driver's status by which this process's CUDA context is lost, 0: it is not known to be."""
        return int(self.heap.record[0]["streams"]["lost"])

    def refusal(self) -> OutOfMemory | None:
        """Return the last request of this job that could never be met, if there was one."""
        from zico.base.errors import OutOfMemory
        from zico.pool.layout import refusing_limit

        record = self.record
        if not record["oom_count"]:
            return None
        region_bytes = self.pool.region_bytes
        held_bytes = int(record["oom_held"]) * region_bytes
        budget_bytes = int(self.pool.header["budget_regions"]) * region_bytes
        limit_bytes = refusing_limit(record) * region_bytes
        return OutOfMemory(int(record["oom_request_bytes"]), held_bytes, budget_bytes, limit_bytes)

    def explain_failure(self) -> str | None:
        """Return why this job ran out of memory, if it did."""
        refused = self.refusal()
        if refused is None:
            return None
        reason = str(refused)
        if self.heap.no_next_tier:
            reason += f"; nor can this GPU go on in the machine's memory: {self.heap.no_next_tier}"
        return reason


_current: Session | None = None


def current() -> Session | None:
    """Return this process's session, ``None`` if it is in no pool."""
    return _current


def current_here() -> Session | None:
    """Return this process's session, ``None`` also in a child forked from a process that has one."""
    return _current if _current is not None and not _current.is_parents else None


def is_forked() -> bool:
    """Tell whether this process was forked from one that had joined, and has not joined itself."""
    return _current is not None and _current.is_parents


def once(enable: Callable[[], Session | None]) -> Callable[[], Session | None]:
    """Wrap what enables an adapter: once it has in this process, or while it does, it only returns the session."""
    on_in: int | None = None

    @functools.wraps(enable)
    def enable_once() -> Session | None:
        nonlocal on_in
        if on_in == os.getpid():
            return current()
        on_in = os.getpid()
        joined = None
        try:
            joined = enable()
        finally:
            on_in = None if joined is None else os.getpid()
        return joined

    return enable_once


def pool_kind() -> str:
    """Return the kind of device whose pool ``attach`` joins, or has joined: ``host`` or ``cuda``; of none, ``host``.

    For adapters that must not touch a GPU before their framework does: it asks the broker and
    initialises nothing.

    Raises:
        BrokerError: The broker does not answer.
    """
    from zico.broker.client import BrokerClient

    socket_path = socket_to_join()
    if socket_path is None:
        return "host"
    if _current is not None:
        return _current.membership.device.kind
    with BrokerClient(socket_path) as client:
        return kind_of(client.status().device)


def socket_named() -> str | None:
    """Return where the broker listens that processes of this job join, if there is one."""
    return os.environ.get(SOCKET_VARIABLE)


def is_descendant() -> bool:
    """Tell whether an ancestor of this process is the job; it may be that ancestor's loader worker."""
    return os.environ.get(OWNER_VARIABLE) not in (None, "", str(os.getpid()))


_trains = False


def claim_to_train() -> None:
    """Let this process join although an ancestor has: it is known to train."""
    global _trains  # noqa: PLW0603 - of the process
    _trains = True


def starts_launcher(argv: Sequence[str]) -> bool:
    """Tell whether a command line starts a program that starts those that train, such as ``torchrun``."""
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "") in LAUNCHERS
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).name in LAUNCHERS
        elif word == "-c":
            return False
    return False


def step_aside() -> None:
    """Leave the pool to processes that are about to be started, if this one has taken nothing from it yet."""
    joined = current_here()
    if joined is None or not joined.is_unused:
        return
    joined.record["aside"] = 1
    joined.leave()
    os.environ.pop(OWNER_VARIABLE, None)


def socket_to_join() -> Path | None:
    """Return where the broker listens that this process may join; waits for one that is starting.

    The socket of a run has a directory of its own, which goes with the run. Without it nobody starts.
    """
    named = socket_named()
    if not named or starts_launcher(sys.orig_argv) or (is_descendant() and not _trains):
        return None
    socket_path = Path(named)
    end_s = time.monotonic() + starting_s(os.environ.get(STARTING_VARIABLE, ""))
    while not socket_path.exists() and socket_path.parent.exists() and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return socket_path


def attach(framework: str, *, kind: str = "host") -> Session | None:
    """Join the pool whose broker ``ZICO_SOCKET`` names, once per process.

    Waits for the broker's answer (seconds at most). On a CUDA device it initialises CUDA in this
    process.

    Args:
        framework: Who asks.
        kind: Of which kind of device the caller shares memory: ``host`` or ``cuda``.

    Returns:
        The session; ``None`` if there is no broker to join, or this process is a launcher, or it
        descends from one that has joined. Training then goes on as without Zico.

    Raises:
        BrokerError: The broker refuses or does not answer.
        ConfigError: A setting in the environment makes no sense.
        DriverError: The device refuses.
        HookError: The pool is on a device of another kind. Or this process was forked from one that
            uses CUDA, or has had tensors in the pool.
    """
    global _current  # noqa: PLW0603 - hooks serve a process, so there is one session per process
    if _current is not None:
        _current.refuse_fork()
        _refuse_kind(_current.membership, framework, kind)
    socket_path = socket_to_join()
    if socket_path is None:
        return None
    if _current is not None and _current.is_parents:
        _current.let_go_in_child()
        _current = None
    if _current is None:
        _current = _join(socket_path, framework_of(framework), kind)
        os.environ[OWNER_VARIABLE] = str(os.getpid())
    _current.frameworks.append(framework)
    return _current


def _join(socket_path: Path, framework: str, kind: str) -> Session:
    from zico.job.settings import job_settings

    settings = job_settings(os.environ, sys.argv[0])
    from zico.broker.client import BrokerClient
    from zico.heap import hooks  # noqa: F401 - compiled or loaded before the place in the pool is taken
    from zico.job.paged_job import check_swapping, managed_window, open_heap, serve_pages

    with BrokerClient(socket_path) as client:
        membership = client.join(settings.name, framework, settings.share, settings.wish, settings.run)
    with contextlib.ExitStack() as undo:
        undo.callback(membership.leave)
        if membership.device.kind != kind:
            membership.close_descriptors()
        _refuse_kind(membership, framework, kind)
        pool = undo.enter_context(membership.map_pool())
        timeline = _device_timeline(pool, kind, settings.spacing_bytes)
        of_device: dict[str, Any] = {}
        if timeline is not None:
            undo.callback(timeline.close)
            of_device["timeline"] = timeline.functions
            of_device |= managed_window(undo, pool, membership.job, settings)
            check_swapping(pool, membership.job, settings, framework)
        heap = open_heap(pool, membership.job, settings, framework, of_device)
        if settings.ring:
            _record(heap, settings.ring, framework)
        serve_pages(heap)
        heap.enable(plan=settings.plans and heap.managed is None)
        undo.pop_all()
    session = Session(membership, pool, heap, settings, timeline)
    if settings.remembers:
        from zico.job.remembered import remember

        remember(session, framework)
    if kind == "host" and settings.wish.save is None:
        session.overflow()
    if kind != "host" and settings.moves_context:
        session.rest = _rest_aside(session)
    _guard_forks(session)
    _explain_failures(session)
    return session


def _rest_aside(session: Session) -> Callable[[], None] | None:
    """Return what puts the CUDA contexts aside; says so if the driver cannot, and the job goes on."""
    from zico.base.errors import DriverError
    from zico.job.context_aside import ContextAside

    try:
        return ContextAside(session).rest
    except DriverError as error:
        complain("ZICO_MOVE_CONTEXT has no effect", error)
        return None


def _device_timeline(pool: PoolTable, kind: str, spacing_bytes: int | None) -> DeviceTimeline | None:
    """Return the way onto the device's timeline, ``None`` on the host, which works before the processor's eyes."""
    if kind == "host":
        return None
    from zico.job.device_timeline import DeviceTimeline

    return DeviceTimeline(pool, spacing_bytes)


def _refuse_kind(membership: Membership, framework: str, kind: str) -> None:
    """Refuse a pool whose memory the caller cannot share."""
    device = membership.device
    if device.kind != kind:
        raise HookError(
            f"the pool is on {device.name}, and what Zico has for {framework} here shares the memory of {kind} devices "
            "only: choose another --device"
        )


def _guard_forks(session: Session) -> None:
    """Let forked children keep off the pool (invariant 10)."""
    if session.membership.device.kind == "host":
        from zico.heap.fork import ForkGuard

        ForkGuard(session.heap, session.membership.leave)
    else:  # nothing to copy: a child cannot reach a GPU's memory that its parent has mapped
        from zico.device.cuda.bindings import let_go_of_device_files

        # To the broker an open connection means that the driver's files may be open, too.
        os.register_at_fork(after_in_child=lambda: session.detach_fork(hangs_up=let_go_of_device_files()))


def _record(heap: Heap, path: str, framework: str) -> None:
    """Record into the ring at ``path``; says so if that cannot be, and the job goes on."""
    from zico.base.errors import TraceError
    from zico.trace.ringfile import RingFile

    try:
        heap.record_to(RingFile(path, framework, int(heap.record[0]["threshold_bytes"])))
    except TraceError as error:
        complain("this process is not recorded", error)


def _explain_failures(session: Session) -> None:
    """Add the budget's side of the story to the traceback of a job that ran out of memory."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        reason = session.explain_failure()
        if reason is not None:
            inform(f"out of memory: {reason}")

    sys.excepthook = excepthook


def step() -> None:
    """End this job's iteration and begin the next one.

    It waits until the scheduler admits the next iteration. Outside a pool it does nothing.
    """
    if _current is not None:
        _current.step()


@contextlib.contextmanager
def iteration() -> Iterator[None]:
    """Run the body as one iteration; it calls ``step`` at the end, also when the body raises.

    Use it around the body of a training loop, not around the loop.
    """
    if _current is not None:
        _current.ignore_adapters()
    try:
        yield
    finally:
        step()


def share(frozen: Any) -> Any:  # noqa: ANN401 - what the frameworks have
    """Hold frozen memory once together with other jobs of the pool that have the same bytes.

    ``zico run --share-frozen`` does it for all frozen weights of PyTorch, TensorFlow and Keras. JAX
    does not say what is frozen, so there it is asked for. All bits stay. What is written is this
    process's alone, and counts again. Outside a pool it does nothing, and on a GPU only for PyTorch.

    Args:
        frozen: A PyTorch module, of which the parameters are meant that require no gradient. Or a
            Keras layer or model, or a ``tf.Module``: what is not trainable. Or tensors, or
            variables of TensorFlow, that nobody changes any more. Or a tree of JAX arrays.

    Returns:
        What was given, or a tree with new arrays in the place of JAX's: use that one, and keep no
        other. What the budget has no room for stays as it was.

    Raises:
        ConfigError: It is none of these, or JAX traces the function that calls this.
    """
    if _current is None or not (_current.sharers and _current.is_member):
        return frozen
    given = [*frozen] if isinstance(frozen, Iterator) else frozen
    sharers = [sharer() for sharer in _current.sharers]
    for sharer in sharers:
        if sharer.knows(given):
            return sharer.share(given)
    raise ConfigError(
        f"zico.share was given a {type(frozen).__name__}: give it {', or '.join(s.takes for s in sharers)}"
    )


def status() -> JobStatus | None:
    """Return this job's figures in the pool, or ``None`` outside a pool."""
    if _current is None:
        return None
    from zico.job.status import status_of

    return status_of(_current)
