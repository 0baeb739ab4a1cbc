"""What a thread of a job does while it waits for memory: it evicts what others ask for, sleeps, and sees to signals.

Theory of operation
    Before each look the thread obeys what others have asked its job for (``zico.heap.evicting``). It
    sleeps outside the heap's mutex until pool or heap have changed.

    Python notes a signal and runs its handler when bytecode runs next in the main thread. A wait in
    an allocation runs none for as long as it lasts. But a signal ends the sleep on a futex, since
    Python asks for no restart of system calls. The wait then takes the global lock and lets Python
    run its handlers, between two sleeps and outside our mutexes::

        sleep | signal | handlers run | sleep ...          a handler that returns
        sleep | signal | handler raises | next tier | ...  the allocation ends, then Python raises

    No exception can pass through the framework's code. It is kept, and raised as soon as bytecode
    runs. Until then the main thread waits for no memory any more: what does not fit goes to the
    next tier.

Guarantees
    7. A wait ends without a signal, too. The global lock is taken only where one has come.
    Only the main thread does so, and nothing happens once the interpreter has ended.

Known limitations
    * A signal that comes between two sleeps ends none: its handler runs when the wait is over, or
      with the next signal. A job that marks its iterations sees it within a second at a boundary.
    * Another thread may hold the global lock while it waits for something that the main thread
      holds, a lock of the framework say. Then neither goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numba import types

from zico.base.compiled import callback, compiled, inlined, keep_out_of_line, record_at
from zico.base.libc import in_main_thread, monotonic_ns, private_lock, private_unlock
from zico.heap import evicting
from zico.heap.layout import HEAP, WAIT, job_of, pool_of
from zico.pool import living, rules, waits
from zico.pool.results import COMING, GRANTED, NOTHING

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job
    from zico.pool.waits import Look

_I32, _I64 = types.int32, types.int64
_ERROR_OFFSET = int(HEAP.fields["wait"][1]) + int(WAIT.fields["error"][1])
_WORD_BYTES = 8

is_initialized = types.ExternalFunction("Py_IsInitialized", _I32())
take_global_lock = types.ExternalFunction("PyGILState_Ensure", _I32())
leave_global_lock = types.ExternalFunction("PyGILState_Release", types.void(_I32))
_is_raising = types.ExternalFunction("PyErr_Occurred", _I64())
_run_handlers = types.ExternalFunction("PyErr_CheckSignals", _I32())
_take_error = types.ExternalFunction("PyErr_Fetch", types.void(_I64, _I64, _I64))
_raise = types.ExternalFunction("PyErr_Restore", types.void(_I64, _I64, _I64))
_call_later = types.ExternalFunction("Py_AddPendingCall", _I32(_I64, _I64))


class Words(NamedTuple):
    """What says that a look may find more than the last one."""

    sequence: int  # of the pool
    answered: int  # questions to the swapping thread: an answer changes no word that is slept on


@compiled
def begin_look(heap: HeapRecord, need: int) -> Words:
    """Evict what others ask for, and see who stands still, before a thread looks again.

    Args:
        heap: The HEAP record.
        need: Regions for which the thread waits, 0: for what the job has evicted.
    """
    keep_out_of_line()
    me = job_of(heap)
    me.need = max(me.need, need or me.evicted)  # what was granted meanwhile was for something else
    evicting.obey(heap, me)
    living.look_around(pool_of(heap))
    return Words(waits.sequence_of(pool_of(heap)), heap.swap.answered)


@compiled
def sleep(heap: HeapRecord, words: Words) -> bool:
    """Sleep until pool or heap have changed, outside the mutex; Python's handlers run for a signal that ends that."""
    keep_out_of_line()
    private_unlock(heap.mutex_address)
    interrupted = heap.swap.answered == words.answered and waits.sleep_until_change(pool_of(heap), words.sequence)
    if interrupted:
        handle(heap)
    private_lock(heap.mutex_address)
    return interrupted


# -- when nobody moves -----------------------------------------------------------------------------


@compiled
def is_stuck(heap: HeapRecord, me: Job, still_ns: int) -> bool:
    """Tell whether nobody can go on, nothing having moved for so long, and this job is to find a way."""
    keep_out_of_line()
    pool = pool_of(heap)
    patience_ns = waits.patience_ns(pool, int(heap.backing.overflow != 0))
    if patience_ns < rules.IDLE_NS and _was_stuck(heap, me):
        patience_ns = -1
    return still_ns > patience_ns and waits.is_first_to_yield(pool)


@inlined
def _was_stuck(heap: HeapRecord, me: Job) -> bool:
    """Tell whether the job has found out before that nobody can go on.

    That holds in the same iteration, and in later ones while the same jobs stand still in the same
    iterations of theirs.
    """
    if heap.wait.stuck_iteration == me.iteration + 1:
        return True
    return bool(heap.wait.stuck_beside != 0 and heap.wait.stuck_beside == waits.idlers(pool_of(heap)))


@compiled
def note_stuck(heap: HeapRecord, me: Job) -> None:
    """Remember that nobody can go on in this iteration, and beside whom: the job is then quick to find a way."""
    keep_out_of_line()
    heap.wait.stuck_iteration = me.iteration + 1
    if me.over == 0:
        heap.wait.stuck_beside = waits.idlers(pool_of(heap))


# -- for what the job has evicted ------------------------------------------------------------------


@compiled
def await_return(heap: HeapRecord, me: Job) -> None:
    """Wait for what the job has evicted, unless it is to go on without. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    if heap.wait.return_until_ns == 0:
        return
    heap.wait.return_until_ns = monotonic_ns() + evicting.patience_ns(heap)
    waits.start_waiting(pool_of(heap), me.evicted)
    waits.wait(pool_of(heap), heap, 0, begin_look, _look_for_return, sleep)
    waits.stop_waiting(pool_of(heap))


@compiled
def _look_for_return(heap: HeapRecord, _need: int, look: Look) -> tuple[int, bool]:
    """Return ``GRANTED``, ``COMING``, or ``NOTHING``: the job is to go on without."""
    keep_out_of_line()
    me = job_of(heap)
    if evicting.is_complete(heap, me):
        return GRANTED, False
    is_over = look.now_ns > heap.wait.return_until_ns or is_stuck(heap, me, look.still_ns)
    if is_over or has_raised(heap):
        heap.wait.return_until_ns = 0
        return NOTHING, False
    return COMING, False


# -- signals ---------------------------------------------------------------------------------------


@compiled
def handle(heap: HeapRecord) -> None:
    """Run Python's handlers of the signals that have come, if this is the main thread; outside all mutexes of ours.

    Waits for Python's global lock. What a handler raises is kept, and raised when bytecode runs.
    """
    keep_out_of_line()
    if not in_main_thread() or is_initialized() == 0:
        return
    if heap.wait.error[0] == 0:
        held = take_global_lock()
        if _is_raising() == 0 and _run_handlers() != 0:
            error = heap.address + _ERROR_OFFSET
            _take_error(error, error + _WORD_BYTES, error + 2 * _WORD_BYTES)
        leave_global_lock(held)
    if heap.wait.error[0] != 0:  # also of a signal before, for which the interpreter's queue was full
        _call_later(heap.wait.raise_address, heap.address)


@inlined
def has_raised(heap: HeapRecord) -> bool:
    """Tell whether a handler has raised what this thread, the main one, is still to raise: it is to wait no more."""
    return bool(heap.wait.error[0] != 0 and in_main_thread())


@callback(_I32(_I64))
def raise_kept(heap_address: int) -> int:
    """Raise in the main thread what a handler has raised; the interpreter calls it (``Py_AddPendingCall``)."""
    heap = record_at(heap_address, HEAP)
    kind, value, traceback = heap.wait.error[0], heap.wait.error[1], heap.wait.error[2]
    if kind == 0:
        return 0
    heap.wait.error[0] = heap.wait.error[1] = heap.wait.error[2] = 0
    _raise(kind, value, traceback)
    return -1
