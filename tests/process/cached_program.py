"""A program with one function in Zico's cache: calls it, and says where the cache has its index."""

from __future__ import annotations

from zico.compiled import compiled


@compiled
def twice(number: int) -> int:
    """Double a number."""
    return 2 * number


if __name__ == "__main__":
    print(twice(21))  # noqa: T201 - the test reads it
    print(twice._cache._cache_file._index_path)  # noqa: T201
