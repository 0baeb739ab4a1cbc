"""Where Zico keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_root() -> Path:
    """Return where compiled code is kept: ``ZICO_CACHE_DIR``, else the user's cache directory."""
    return Path(os.environ.get("ZICO_CACHE_DIR") or platformdirs.user_cache_dir("zico"))
