"""The simulated caching allocator against its rules, and against a model that keeps lists of blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.units import KIB, MIB
from zico.lab.packing.caching import reserved_apart, reserved_by_caching
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import Plan, Problem
from zico.trace.classes import TensorClass


def problem_of(*tensors: tuple[int, int, int]) -> Problem:
    """Make a problem of (first tick, end, bytes)."""
    lower, upper, size = np.array(tensors, np.int64).reshape(-1, 3).T
    return Problem(lower, upper, size)


def reserved_bytes(*tensors: tuple[int, int, int]) -> int:
    """Return what the allocator reserves for (first tick, end, bytes)."""
    return reserved_by_caching(problem_of(*tensors)).reserved_bytes


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    """A request gets a segment as large as the rules say, after rounding up to 512 bytes."""
    assert reserved_bytes((0, 1, size)) == segment


def test_small_blocks_share_a_segment_and_large_ones_do_not_use_it() -> None:
    """2 MiB hold 4,096 requests of one byte; one more, or a large one, takes another segment."""
    assert reserved_bytes(*[(0, 1, 1)] * 4096) == 2 * MIB
    assert reserved_bytes(*[(0, 1, 1)] * 4097) == 4 * MIB
    assert reserved_bytes((0, 1, 1), (1, 2, MIB + 1)) == 22 * MIB


def test_classes_of_tensors_share_no_block() -> None:
    """Weights, maps and temporaries each have segments of their own, of whole blocks; temporaries come last."""
    problem = problem_of((0, 9, 1), (0, 8, MIB), (1, 8, MIB), (2, 3, 512), (4, 5, 512), (6, 9, 3 * MIB))
    kinds = (
        TensorClass.PERSISTENT,
        TensorClass.FEATURE_MAP,
        TensorClass.GRADIENT_MAP,
        TensorClass.TEMPORARY,
        TensorClass.TEMPORARY,
        TensorClass.TEMPORARY,
    )
    offsets, temporaries = reserved_apart(problem, np.array(kinds, np.int8), 2 * MIB)
    assert offsets.tolist() == [0, 2 * MIB, 3 * MIB, 4 * MIB, 4 * MIB, 6 * MIB]
    assert temporaries == range(2, 13)
    assert reserved_apart(problem_of((0, 1, 1)), np.array(kinds[:1], np.int8), 2 * MIB)[1] == range(1, 1)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains() -> None:
    """Of a free block of 12 MiB, a request leaves a remainder that another one can have, or keeps it."""
    first, third = (0, 1, 12 * MIB), (1, 2, MIB + 512)
    assert reserved_bytes(first, (1, 2, 11 * MIB - 512), third) == 12 * MIB
    assert reserved_bytes(first, (1, 2, 11 * MIB), third) == 32 * MIB


def test_a_remainder_of_a_mebibyte_stays_with_its_block() -> None:
    """What is freed above a block that kept one does not merge with it: 11 of 20 MiB are free, not 12."""
    halves = [(0, 1, 9 * MIB), (0, 2, 9 * MIB + MIB // 2)]
    assert reserved_bytes(*halves, (1, 3, 8 * MIB), (2, 3, 11 * MIB + MIB // 2)) == 32 * MIB
    assert reserved_bytes(*halves, (1, 3, 8 * MIB - 512), (2, 3, 11 * MIB + MIB // 2)) == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    """With 40, 12 and 20 MiB free, a request of 12 MiB leaves those of 20 and 40 to the others."""
    free = [(0, 1, 40 * MIB), (0, 1, 12 * MIB), (0, 1, 20 * MIB)]
    assert reserved_bytes(*free, *[(1, 2, size * MIB) for size in (12, 20, 40)]) == 72 * MIB


def test_freed_neighbours_merge_within_a_segment_and_not_beyond() -> None:
    """Halves of a segment of 20 MiB become one block again; two segments of 10 MiB never do."""
    assert reserved_bytes((0, 1, 9 * MIB), (0, 1, 9 * MIB), (2, 3, 20 * MIB)) == 20 * MIB
    assert reserved_bytes((0, 1, 10 * MIB), (0, 1, 10 * MIB), (2, 3, 20 * MIB)) == 40 * MIB


@dataclasses.dataclass
class Block:
    """A block of the model."""

    offset: int
    size: int
    free: bool = True


class Model:
    """The allocator once more: a list of segments, each a list of blocks."""

    def __init__(self) -> None:
        """Begin without segments."""
        self.segments: list[tuple[bool, list[Block]]] = []
        self.reserved = 0

    def allocate(self, size: int) -> int:
        """Return the offset of a new block."""
        size = max(512, (size + 511) // 512 * 512)
        small = size <= MIB
        fits = [
            (block.size, block.offset, blocks, block)
            for is_small, blocks in self.segments
            for block in blocks
            if is_small == small and block.free and block.size >= size
        ]
        if fits:
            _, _, blocks, block = min(fits, key=lambda fit: fit[:2])
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            block = Block(self.reserved, segment)
            blocks = [block]
            self.segments.append((small, blocks))
            self.reserved += segment
        rest = block.size - size
        if rest >= 512 and (small or rest > MIB):
            blocks.insert(blocks.index(block) + 1, Block(block.offset + size, rest))
            block.size = size
        block.free = False
        return block.offset

    def free(self, offset: int) -> None:
        """Free the block at an offset."""
        for _, blocks in self.segments:
            for block in blocks:
                if block.offset == offset:
                    block.free = True
            merged = blocks[:1]
            for block in blocks[1:]:
                if block.free and merged[-1].free:
                    merged[-1].size += block.size
                else:
                    merged.append(block)
            blocks[:] = merged


SIZES = st.one_of(st.integers(1, 3 * KIB), st.integers(MIB - 600, MIB + 600), st.integers(9 * MIB, 25 * MIB))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), SIZES), max_size=25))
def test_every_offset_is_the_models(lives: list[tuple[int, int, int]]) -> None:
    """Offsets and reserved bytes are those of the model, and no two tensors share a byte."""
    problem = problem_of(*[(lower, lower + duration, size) for lower, duration, size in lives])
    found = reserved_by_caching(problem)
    model = Model()
    offsets = {}
    for tick in range(problem.n_ticks):
        for i in np.flatnonzero(problem.upper == tick).tolist():
            model.free(offsets[i])
        for i in np.flatnonzero(problem.lower == tick).tolist():
            offsets[i] = model.allocate(int(problem.size_bytes[i]))
    assert found.offset_bytes.tolist() == [offsets[i] for i in range(len(problem))]
    assert (found.reserved_bytes, found.n_segments) == (model.reserved, len(model.segments))
    assert judge(problem, Plan(found.offset_bytes, "caching", 0.0)).is_good
