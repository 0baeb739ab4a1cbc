"""How a job without room for a tensor goes on: one ladder, from what costs nothing to what is slow but always works.

Theory of operation
    An allocation that finds no place climbs down a ladder. It looks again whenever something has
    changed, and each time it takes the first rung that helps::

        own holes         a worse place, in regions that the job holds anyway
        optimizer state   it leaves until the next step needs it        (``zico.heap.state_offload``)
        swap              a thread of the job sends idle tensors to a tier           (``zico.swap.swapper``)
        let others move   while some job goes on, it may free memory
        do without        go on without a region, or without what the job has evicted
        ask others        blocked jobs evict what this one lacks                     (``zico.pool.waits``)
        spill             the tensor goes to the next tier

    The last three are for a pool in which nobody can go on, or a wait that has lasted for the wait
    limit.

    A rung takes the request and why there is no place: ``MUST_WAIT`` or ``NEVER_FITS``. It returns
    the tensor's offset or what it has found out:

    * ``AGAIN``: memory has come free, so the allocation looks again.
    * ``COMING``: memory is about to come free, so the allocation sleeps. ``ASKED``: the same, by
      other jobs.
    * ``NOTHING``: the next rung is to try.
    * ``NEVER_FITS`` or ``NOT_SERVED``: no rung helps.

    The allocation holds no lock while it sleeps, and needs no Python. If a signal comes, Python's
    handlers run (``zico.heap.waiting``).

    The swapping thread is woken by an eventfd. It answers in two words of the heap's record: how
    many questions it has dealt with, and how many bytes leave. A thread that brings a tensor back
    before it is needed is *patient*: it asks for nothing, and takes nothing from the next tier,
    since that would send away what is needed sooner. A thread that needs what it brings ends its
    patience.

    A job on the host whose user has said nothing *overflows*: what exceeds all that it may hold goes
    to the next tier. The first such tensor has the job begin to swap, where its framework can.

Guarantees
    7. Every wait ends at the wait limit. An answer by which nothing leaves ends the wait for
       swapping at once. The next question is put when the pool has changed, or the heap, or where a
       tensor is. What came back idle can leave again, and what leaves need not empty a region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numba import types

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.base.libc import write_bytes
from zico.heap import backing, evicting, placing, state_offload, waiting
from zico.heap.layout import SPILL, job_of, pool_of
from zico.pool import waits
from zico.pool.layout import cap_of
from zico.pool.results import AGAIN, ASKED, COMING, MUST_WAIT, NEVER_FITS, NOT_SERVED, NOTHING

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.heap.waiting import Words
    from zico.pool.layout import Job
    from zico.pool.waits import Look

NOBODY_TO_ASK = -1
NOT_ASKED = -1
"""No state of pool and heap has this number: the last answer says nothing about what has moved since."""
_EVENTS_SHIFT = 32
"""The pool's sequence has 32 bits; what comes free inside a region changes the heap's events alone."""

this_thread = types.ExternalFunction("pthread_self", types.int64())


_holds_global_lock = types.ExternalFunction("PyGILState_Check", types.int32())


class Tensor(NamedTuple):
    """What a thread waits to place."""

    arena: int  # where it belongs, unless the plan has a place for it
    planned: int  # that place, or ``NOTHING``
    size_bytes: int  # rounded up to the least alignment
    alignment: int  # a power of two
    need: int  # its size in the pool's regions


class Request(NamedTuple):
    """A tensor without a place, and how things stand at this look for one."""

    tensor: Tensor
    look: Look
    is_stuck: bool  # nobody can go on, and this job is to find a way
    is_late: bool  # the wait limit has passed, or what a signal's handler has raised is to be raised


@compiled
def find_place(heap: HeapRecord, me: Job, arena: int, planned: int, size_bytes: int, alignment: int) -> int:
    """Wait until there is a place for a tensor (``Tensor``). Enters and leaves inside the heap's mutex.

    Returns:
        An offset; ``NEVER_FITS``; ``NOT_SERVED``.
    """
    keep_out_of_line()
    pool = pool_of(heap)
    need = (size_bytes + (1 << heap.pool_shift) - 1) >> heap.pool_shift
    waits.start_waiting(pool, need)
    found = waits.wait(
        pool, heap, Tensor(arena, planned, size_bytes, alignment, need), _begin_look, _look, waiting.sleep
    )
    waits.stop_waiting(pool)
    if found == NEVER_FITS and not _ends_otherwise(heap):
        refuse(me, size_bytes)
    return found


@compiled
def _begin_look(heap: HeapRecord, tensor: Tensor) -> Words:
    keep_out_of_line()
    me = job_of(heap)
    me.patient = 1 if me.waiting_threads == 1 and _is_patient(heap) else 0
    backing.bring_up(heap)
    return waiting.begin_look(heap, tensor.need)


@compiled
def _look(heap: HeapRecord, tensor: Tensor, look: Look) -> tuple[int, bool]:
    """Return where the tensor can be, or as the rungs do; the wait is in vain while the budget is too small."""
    keep_out_of_line()
    me = job_of(heap)
    is_stuck = waiting.is_stuck(heap, me, look.still_ns)
    is_late = look.waited_ns > heap.wait.limit_ns or _ends_otherwise(heap)
    request = Request(tensor, look, is_stuck, is_late)
    found = why = _own_holes(heap, me, request, MUST_WAIT)
    is_vain = why == NEVER_FITS and not _frees_come(heap, request)
    if why in (MUST_WAIT, NEVER_FITS):
        found = _climb_down(heap, me, request, why)
    return found, is_vain


@inlined
def _frees_come(heap: HeapRecord, request: Request) -> bool:
    """Tell whether the device has yet to finish with tensors of the job's that are freed."""
    return heap.streams.n_deferred > 0 and not request.is_late


@inlined
def _ends_otherwise(heap: HeapRecord) -> bool:
    """Tell whether something else than memory ends the wait: what a signal's handler raised, or a lost context."""
    return waiting.has_raised(heap) or heap.streams.lost != 0


@compiled
def _climb_down(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Take the first rung below the job's own holes that helps; returns as a rung does."""
    keep_out_of_line()
    found = _rest(heap, me, request, why)
    if found == NOTHING:
        found = _swap(heap, me, request, why)
    if found == NOTHING:
        found = _let_others_move(heap, me, request, why)
    if found == NOTHING:
        found = _do_without(heap, me, request, why)
    if found == NOTHING:
        found = _ask_others(heap, me, request, why)
    if found == NOTHING:
        found = _spill(heap, me, request, why)
    return found


@compiled
def exceed(heap: HeapRecord, me: Job, size_bytes: int, alignment: int) -> int:
    """Place a tensor in the next tier that alone exceeds every budget, if the job overflows; else refuse it."""
    keep_out_of_line()
    offset = NEVER_FITS
    if heap.swap.overflows != 0 and size_bytes <= heap.spill.limit_bytes:
        _begin_to_swap(heap, me, size_bytes)
        offset = placing.place(heap, SPILL, NOTHING, size_bytes, alignment)
    if offset < 0:
        refuse(me, size_bytes)
        offset = NEVER_FITS
    return offset


@compiled
def refuse(me: Job, size_bytes: int) -> None:
    """Note a request that the budget can never meet."""
    keep_out_of_line()
    me.oom_request_bytes = size_bytes
    me.oom_held = me.held
    me.oom_count += 1


@inlined
def _at_limit(me: Job, why: int) -> bool:
    """Tell whether the job is in its own way: no other job can help beyond its limit, or the whole budget."""
    return why == NEVER_FITS or me.over != 0


# -- own holes -------------------------------------------------------------------------------------


@inlined
def _own_holes(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Place a tensor where it belongs, or in any hole where the job may hold no more; else return why not.

    While the job waits for what it has evicted it takes nothing new.
    """
    if not evicting.is_complete(heap, me) and request.look.now_ns <= heap.wait.return_until_ns:
        return why
    tensor = request.tensor
    offset = placing.place(heap, tensor.arena, tensor.planned, tensor.size_bytes, tensor.alignment)
    swaps = heap.swap.fd != NOBODY_TO_ASK and tensor.arena < SPILL
    if swaps and offset in (MUST_WAIT, NEVER_FITS) and _at_limit(me, offset):
        hole = placing.in_hole(heap, tensor.size_bytes, tensor.alignment)
        offset = hole if hole >= 0 else offset
    return offset


# -- optimizer state -------------------------------------------------------------------------------


@inlined
def _rest(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Let optimizer state leave: what the tensor lacks, or all that it needs where nobody moves."""
    if _at_limit(me, why):
        sent = state_offload.send(heap, me, max(me.held + me.need - cap_of(pool_of(heap), me), 1))
    elif request.is_stuck and (request.is_late or not _is_patient(heap)):
        sent = state_offload.send(heap, me, me.need)
        heap.optimizer.lacking += sent
    else:
        sent = 0
    return AGAIN if sent > 0 else NOTHING


# -- swap ------------------------------------------------------------------------------------------


@inlined
def _is_patient(heap: HeapRecord) -> bool:
    return heap.swap.patient_thread != 0 and heap.swap.patient_thread == this_thread()


@compiled
def _swap(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Have idle tensors leave; a patient thread waits until others have what they need.

    A thread that holds Python's global lock waits for nothing, since those who copy need that lock.
    """
    keep_out_of_line()
    if request.is_late:
        return NOTHING
    if _is_patient(heap):
        return COMING
    if heap.swap.fd == NOBODY_TO_ASK or not _at_limit(me, why) or _holds_global_lock() != 0:
        return NOTHING
    if heap.swap.leaving_bytes > 0 or heap.swap.answered < heap.swap.asked:
        return COMING
    state = request.look.word.sequence + (heap.events << _EVENTS_SHIFT)
    if heap.swap.sequence == state:
        return NOTHING
    heap.swap.sequence = state
    heap.swap.asked += 1
    write_bytes(heap.swap.fd, pool_of(heap).one_address, 8)
    return COMING


# -- others, and the next tier ---------------------------------------------------------------------


@inlined
def _let_others_move(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Wait while others move, and may make room; refuse what the budget has been too small for all along.

    A job that overflows goes on to the next rungs with that, and in the same iteration at once.
    """
    if why == NEVER_FITS:
        since_ns = request.look.vain_since_ns
        overflows = heap.swap.overflows != 0
        was_sure = overflows and heap.wait.stuck_iteration == me.iteration + 1
        is_sure = was_sure or (since_ns != 0 and request.look.now_ns - since_ns > waits.STUCK_NS)
        if _frees_come(heap, request) or not is_sure:
            return COMING
        return NOTHING if overflows else NEVER_FITS
    return NOTHING if request.is_stuck or request.is_late else COMING


@compiled
def _do_without(heap: HeapRecord, me: Job, request: Request, why: int) -> int:  # noqa: ARG001 - as a rung
    """Go on without a region where the job is paged, else without what the job has evicted."""
    keep_out_of_line()
    if request.is_stuck and heap.backing.entered != 0:
        heap.wait.frugal = 1
        tensor = request.tensor
        offset = placing.place(heap, tensor.arena, tensor.planned, tensor.size_bytes, tensor.alignment)
        heap.wait.frugal = 0
        if offset >= 0:
            waiting.note_stuck(heap, me)  # its next tensors need not find that out again
            return offset
    if heap.wait.return_until_ns == 0:
        return NOTHING
    heap.wait.return_until_ns = 0
    return AGAIN


@compiled
def _ask_others(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Have blocked jobs evict what this one lacks."""
    keep_out_of_line()
    if request.is_late or _at_limit(me, why):
        return NOTHING
    answer = waits.ask_to_evict(pool_of(heap), request.look.word.sequence)
    if answer == ASKED:
        _note_stall(heap, me)
    if answer != COMING:
        return answer
    if request.look.asked_ns == 0:
        return ASKED  # by another job or thread
    return COMING if request.look.now_ns - request.look.asked_ns <= waits.STUCK_NS else NOTHING


@compiled
def _spill(heap: HeapRecord, me: Job, request: Request, why: int) -> int:
    """Put the tensor into the next tier; returns an offset, ``NEVER_FITS`` or ``NOT_SERVED``."""
    keep_out_of_line()
    _note_stall(heap, me)
    if heap.swap.overflows != 0 and _at_limit(me, why):
        _begin_to_swap(heap, me, request.tensor.size_bytes)
    offset = placing.place(heap, SPILL, NOTHING, request.tensor.size_bytes, request.tensor.alignment)
    return offset if offset >= 0 or (offset == NOT_SERVED and why != NEVER_FITS) else NEVER_FITS


@compiled
def _begin_to_swap(heap: HeapRecord, me: Job, size_bytes: int) -> None:
    keep_out_of_line()
    if heap.swap.lacked_bytes == 0:
        heap.swap.lacked_bytes = (me.held << heap.pool_shift) + size_bytes
        write_bytes(heap.swap.start_fd, pool_of(heap).one_address, 8)


@compiled
def _note_stall(heap: HeapRecord, me: Job) -> None:
    keep_out_of_line()
    waits.note_stall(pool_of(heap))
    waiting.note_stuck(heap, me)
