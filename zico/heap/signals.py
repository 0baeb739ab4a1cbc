"""Signals that come while the main thread waits in compiled code: Python's handlers run at once, not when it returns.

Theory of operation
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
    7. A wait ends without this, too. The global lock is taken only where a signal has come.
    Only the main thread does so, and nothing happens once the interpreter has ended.

Known limitations
    * A signal that comes between two sleeps ends none: its handler runs when the wait is over, or
      with the next signal. A job that marks its iterations sees it within a second at a boundary.
    * Another thread may hold the global lock while it waits for something that the main thread
      holds, a lock of the framework say. Then neither goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled, inlined, keep_out_of_line, record_at
from zico.base.libc import in_main_thread
from zico.heap.layout import HEAP, WAIT

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

_I32, _I64 = types.int32, types.int64
_ERROR_OFFSET = int(HEAP.fields["wait"][1]) + int(WAIT.fields["error"][1])
_WORD_BYTES = 8

_is_initialized = types.ExternalFunction("Py_IsInitialized", _I32())
_take_global_lock = types.ExternalFunction("PyGILState_Ensure", _I32())
_leave_global_lock = types.ExternalFunction("PyGILState_Release", types.void(_I32))
_is_raising = types.ExternalFunction("PyErr_Occurred", _I64())
_run_handlers = types.ExternalFunction("PyErr_CheckSignals", _I32())
_take_error = types.ExternalFunction("PyErr_Fetch", types.void(_I64, _I64, _I64))
_raise = types.ExternalFunction("PyErr_Restore", types.void(_I64, _I64, _I64))
_call_later = types.ExternalFunction("Py_AddPendingCall", _I32(_I64, _I64))


@compiled
def handle(heap: HeapRecord) -> None:
    """Run Python's handlers of the signals that have come, if this is the main thread; outside all mutexes of ours.

    Waits for Python's global lock. What a handler raises is kept, and raised when bytecode runs.
    """
    keep_out_of_line()
    if not in_main_thread() or _is_initialized() == 0:
        return
    if heap.wait.error[0] == 0:
        held = _take_global_lock()
        if _is_raising() == 0 and _run_handlers() != 0:
            error = heap.address + _ERROR_OFFSET
            _take_error(error, error + _WORD_BYTES, error + 2 * _WORD_BYTES)
        _leave_global_lock(held)
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
