"""What all tests share: hypothesis takes no time limit for an example, since the first one of a test may compile."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # tests/gpu may run where it is not installed
    import hypothesis

    hypothesis.settings.register_profile("zico", deadline=None)
    hypothesis.settings.load_profile("zico")
