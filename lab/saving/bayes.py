"""AutoSwap's mix of scores, its weights found by Bayesian optimisation.

Each score is standardised over the candidates; the priority is their sum, weighted by four numbers
from -1 to 1. What is minimised is the replayed overhead, by a Gaussian process; the published
search converges in 30 to 40 evaluations. The four scores alone are evaluated first. Source: arXiv
1903.06631; Nogueira, *Bayesian Optimization* (package ``bayesian-optimization``, MIT licence).
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import ConfigError
from zico.lab.saving.autoswap import LEAST_BYTES, SCORES, Candidates, Limited, score
from zico.planning.saving.clock import now_s

if TYPE_CHECKING:
    from zico.lab.saving.autoswap import Floats
    from zico.planning.saving.problem import SwapPlan, SwapProblem

EVALUATIONS = 35
_NO_PLAN = -100.0
"""Target where the weights give no plan: worse than any overhead that is worth a thought."""


class Bayes(Limited):
    """AutoSwap with the best mix of its four scores. Deterministic unless the deadline ends it."""

    name = "bayes"

    def __init__(self, evaluations: int = EVALUATIONS, least_bytes: int = LEAST_BYTES) -> None:
        """Evaluate so many mixes; leave tensors below ``least_bytes`` where they are."""
        self._evaluations = max(evaluations, len(SCORES))
        self._least_bytes = least_bytes

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:
        """Return the plan with the least overhead found, or what is in the way.

        Raises:
            ConfigError: The package is not installed.
        """
        optimizer = _optimizer()
        candidates = Candidates(problem, self._least_bytes)
        scores = np.stack([_standardised(score(name, problem, candidates.gaps)) for name in SCORES])
        tried: list[tuple[float, SwapPlan | str]] = []
        for i in range(self._evaluations):
            weights = np.eye(len(SCORES))[i] if i < len(SCORES) else _suggested(optimizer)
            made = candidates.plan(weights @ scores, limit_bytes, self.name)
            target = _NO_PLAN if isinstance(made, str) else -candidates.replayer.replay(made).overhead
            tried.append((target, made))
            if target == 0 or now_s() > end_s:
                break
            optimizer.register(dict(zip(SCORES, weights.tolist(), strict=True)), target)
        return max(tried, key=operator.itemgetter(0))[1]


def _optimizer() -> Any:  # noqa: ANN401 - the package's class, which is loaded only if asked for
    try:
        from bayes_opt import BayesianOptimization
    except ImportError:
        raise ConfigError("bayesian-optimization is not installed: pip install 'zico-memory[swap]'") from None
    bounds = dict.fromkeys(SCORES, (-1.0, 1.0))
    return BayesianOptimization(None, bounds, random_state=0, verbose=0, allow_duplicate_points=True)


def _suggested(optimizer: Any) -> Floats:  # noqa: ANN401 - as above
    from threadpoolctl import threadpool_limits  # comes with bayesian-optimization

    # Thirty points: threads of BLAS would only wait for one another.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # of a Gaussian process whose length scales meet their bounds
        suggestion = optimizer.suggest()
    return np.array([suggestion[name] for name in SCORES])


def _standardised(values: Floats) -> Floats:
    spread = values.std() if len(values) else 0.0
    return (values - values.mean()) / spread if spread else np.zeros(len(values))
