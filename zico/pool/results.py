"""What compiled functions of pool and heap answer: one number for one meaning.

All numbers are below 0. So a function that returns an offset or an index can return any of them
instead.
"""

from __future__ import annotations

NOTHING = -1
"""There is none: no gap, no planned place, no unit, no piece; of a way to find memory, that it leads nowhere now."""
KEPT = -2
"""What was freed stays with its owner."""

# -- a request for memory --------------------------------------------------------------------------

GRANTED = -3
"""The memory is the job's, which may use it at once."""
BEHIND = -4
"""The regions are the job's, but the stream must first wait for what others do there."""
MUST_WAIT = -5
"""There is no memory now; ask again when pool or heap have changed."""
NEVER_FITS = -6
"""The job can never get so much: refuse the request."""
NOT_SERVED = -7
"""No address space is left, or the job has left the pool: the real allocator is to serve the request."""

# -- a look of a thread that waits -----------------------------------------------------------------

AGAIN = -8
"""Something has come free: look again at once."""
COMING = -9
"""Something is about to come free: sleep until it does."""
ASKED = -10
"""As ``COMING``, and other jobs have been asked to evict."""
ADMITTED = -11
"""The next iteration may begin."""
GIVES_WAY = -12
"""The job is to evict memory before it waits on."""
STAYS = -13
"""The job is paused, or has waited for long: its caller is to look what else there is."""
INTERRUPTED = -14
"""A signal has come."""
