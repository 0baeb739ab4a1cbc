"""Published planners that take candidates by one simple rule: FlashNeuron, Gist, TFLMS, LMS and vDNN.

* ``flashneuron``: what was made first leaves first, until the rest fits. Source: J. Bae et al.,
  "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks" (FAST 2021), section
  4, phase 1. Phase 2 needs compression, which is left out.
* ``gist``: all that the forward pass keeps for the backward pass leaves, and is asked back one
  operation before its use. Source: A. Jain et al., "Gist: Efficient Data Encoding for Deep Neural
  Network Training" (ISCA 2018), section 4. It encodes in memory; here a tier encodes.
* ``tflms``: the tensor with the most operations in its gap leaves first, and is asked back one
  operation before its use. Source: T. Le et al., "TFLMS: Large Model Support in TensorFlow by Graph
  Rewriting" (2018), sections 3 and 4. Published thresholds on this distance are fixed; here the
  threshold falls until the limit is kept.
* ``lms``: whenever an operation lacks memory, what has not been used for longest leaves; it is
  asked back at the operation before its use. Source: IBM's Large Model Support for PyTorch (patches
  to 1.1 to 1.5), which does so at each allocation that fails.
* ``vdnn``: inputs of layers that the backward pass reads again leave behind their last layer of the
  forward pass. Each is asked back when the layer before its own runs its backward pass. In the
  published order: nothing, the inputs of convolutions, all. Source: M. Rhu et al., "vDNN:
  Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design" (MICRO
  2016), section 3.

Known limitations
    A layer of vDNN does not wait for its own copy, as it does as published. And it has one
    algorithm, not a slower one that needs less memory. Both flatter it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.lab.saving.autoswap import Candidates, Limited, gaps_between_accesses, in_order, over
from zico.lab.saving.replayer import Replayer
from zico.planning.saving.problem import READ, SwapPlan

if TYPE_CHECKING:
    from zico.lab.saving.autoswap import Gaps
    from zico.planning.saving.problem import Bools, Int64s, SwapProblem


class FlashNeuron(Limited):
    """From the beginning of the iteration on."""

    name = "flashneuron"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        candidates = Candidates(problem)
        return candidates.plan(-candidates.gaps.first.astype(float), limit_bytes, self.name)


class Gist(Limited):
    """All that the backward pass reads again."""

    name = "gist"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        chosen = _inputs_of_layers(problem)
        made = _whole(problem, chosen, chosen.last, self.name)
        if Replayer(problem).replay(made).is_good:
            return made
        return "with all that is kept encoded the limit is not kept"


class TFLMS(Limited):
    """By the number of operations between two uses."""

    name = "tflms"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        candidates = Candidates(problem)
        distance = (candidates.gaps.last - candidates.gaps.first).astype(float)
        return candidates.plan(distance, limit_bytes, self.name, _one_ahead)


def _one_ahead(problem: SwapProblem, chosen: Gaps, _peak_op: int, planner: str) -> SwapPlan:
    """Return the plan that asks each tensor back at the operation before the one that uses it."""
    return _whole(problem, chosen, chosen.last, planner)


class LMS(Limited):
    """On demand, least recently used first."""

    name = "lms"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        gaps = gaps_between_accesses(problem)
        asked = _reclaimed(problem, gaps, limit_bytes)
        chosen = gaps.take(np.array(list(asked), np.int64))
        made = _whole(problem, chosen, chosen.last, self.name, out=np.array(list(asked.values()), np.int64))
        if Replayer(problem).replay(made).is_good:
            return made
        return "an operation lacks memory when all that is idle has left"


def _reclaimed(problem: SwapProblem, gaps: Gaps, limit_bytes: int) -> dict[int, int]:
    """Return the gaps in which tensors leave, each with the operation at which it is asked to."""
    n, asked, load = problem.n_ops, dict[int, int](), problem.load_bytes.copy()
    for op in range(n):
        rounds = (op - gaps.first) // n * n
        first, last = gaps.first + rounds, gaps.last + rounds
        idle = [i for i in np.flatnonzero((first < op) & (op <= last)).tolist() if i not in asked]
        for i in sorted(idle, key=lambda i: int(first[i])):
            if load[op] <= limit_bytes:
                break
            asked[i] = op - 1 - int(rounds[i])
            load[np.arange(op, last[i] + 1) % n] -= gaps.size_bytes[i]
    return asked


class VDNN(Limited):
    """Nothing, the inputs of convolutions, or all inputs of layers: the first of these that fits."""

    name = "vdnn"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        replayer, inputs = Replayer(problem), _inputs_of_layers(problem)
        of_convolutions = inputs.take(_of_convolutions(problem, inputs))
        for chosen in (of_convolutions, inputs) if len(of_convolutions) else (inputs,):
            made = _one_layer_ahead(problem, chosen)
            if replayer.replay(made).is_good:
                return made
        return f"with all {len(inputs)} inputs of layers away the limit is not kept: it knows no other way"


def _inputs_of_layers(problem: SwapProblem) -> Gaps:
    """Return the gaps between the passes that begin with a read: feature maps that a layer has taken in."""
    gaps = over(gaps_between_accesses(problem), problem.turning_op, problem.n_ops)
    kind = problem.access_kind[problem.access_begin[gaps.tensor] + gaps.gap]
    made = problem.access_op[problem.access_begin[gaps.tensor]] < gaps.first - 1  # by another operation, before
    return gaps.take(np.asarray((kind & READ != 0) & made & ~problem.persistent[gaps.tensor]))


def _of_convolutions(problem: SwapProblem, gaps: Gaps) -> Bools:
    if problem.read_by is not None:
        names = [problem.read_by[tensor] for tensor in gaps.tensor.tolist()]
    else:
        of_op = problem.op_names or ("",) * problem.n_ops
        names = [of_op[op % problem.n_ops] for op in (gaps.first - 1).tolist()]
    return np.array(["conv" in name.lower() for name in names], bool)


def _one_layer_ahead(problem: SwapProblem, chosen: Gaps) -> SwapPlan:
    """Return the plan that asks each tensor back when the one before it in the backward pass is used."""
    order = np.argsort(chosen.last, kind="stable")
    asked = np.empty(len(chosen), np.int64)
    asked[order] = np.append(chosen.last[order[:1]], chosen.last[order[:-1]] + 1)
    asked = np.clip(asked, chosen.first, chosen.last)
    return _whole(problem, chosen, asked, VDNN.name)


def _whole(problem: SwapProblem, chosen: Gaps, asked: Int64s, planner: str, out: Int64s | None = None) -> SwapPlan:
    """Return the plan that moves whole tensors out behind their access, or as given, and back as given."""
    none, leaves = np.zeros(len(chosen), np.int64), chosen.first - 1 if out is None else out
    return chosen.moved(
        in_order(leaves, none, chosen.first, problem.n_ops),
        in_order(np.asarray(asked), none, chosen.last, problem.n_ops),
        planner,
    )
