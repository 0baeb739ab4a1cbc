"""Loops without an optimizer: gradients end iterations, or the period of allocations shows them.

Run by ``test_torch.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from checking import assert_iterations, run
from torch.utils.checkpoint import checkpoint

import zico

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 40
WIDTH = 256
Weights = list[torch.Tensor]


def new_weights(layers: int = 3) -> Weights:
    """Return the weights of a net."""
    return [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(layers)]


def forward(weights: Weights, inputs: torch.Tensor) -> torch.Tensor:
    """Return what a net makes of a batch."""
    for weight in weights:
        inputs = torch.relu(inputs @ weight)
    return inputs


def loss_of(weights: Weights, rows: int = 128) -> torch.Tensor:
    """Return a loss; feature maps are over the threshold."""
    return forward(weights, torch.ones(rows, WIDTH)).square().mean()


def descend(weights: Weights, gradients: Weights | None = None) -> None:
    """Take a step of plain descent in place, by the gradients that the weights have if none are given."""
    with torch.no_grad():
        for i, weight in enumerate(weights):
            weight.sub_(0.1 * (weight.grad if gradients is None else gradients[i]))


def times(step: Callable[[], object], count: int = 10) -> Callable[[], object]:
    """Return what takes some steps."""
    return lambda: [step() for _ in range(count)]


def check_period_detection() -> None:
    """Of a loop that only infers, about one iteration is found for each time round; the first mark makes them parts."""
    weights = [torch.randn(64, 64) for _ in range(6)]
    with torch.inference_mode():
        for _ in range(ROUNDS):
            features = torch.ones(2048, 64)
            for number, weight in enumerate(weights):
                features = torch.relu(features @ weight)[: 2000 - 80 * number].clone()
    assert ROUNDS // 2 <= zico.status()["iterations"] <= ROUNDS
    loss_of(new_weights()).backward()
    assert zico.status()["iterations"] == 1


def forget(weights: Weights) -> None:
    """Let the weights have no gradients."""
    for weight in weights:
        weight.grad = None


def zero(weights: Weights) -> None:
    """Set gradients to zero in place."""
    for weight in weights:
        weight.grad.zero_()


def zero_data(weights: Weights) -> None:
    """Set gradients to zero in a way that autograd does not see."""
    for weight in weights:
        weight.grad.data.zero_()


def check_descent_by_hand_has_an_iteration_for_each_step() -> None:
    """A backward pass for gradients that are none or zero ends one, by whatever way they became so."""
    for clear in (forget, zero, zero_data):
        weights = new_weights()

        def step(weights: Weights = weights, clear: Callable[[Weights], None] = clear) -> None:
            loss_of(weights).backward()
            for weight in weights:
                weight.data -= 0.1 * weight.grad
            clear(weights)
            with torch.no_grad():
                loss_of(weights)

        assert_iterations(30, times(step, 30), clear)


def check_gradients_that_add_up_are_of_one_iteration() -> None:
    """Passes that add to the gradients of the ones before end no further iteration."""
    weights = new_weights()

    def step() -> None:
        for _ in range(4):
            loss_of(weights).backward()
        descend(weights)
        forget(weights)

    assert_iterations(10, times(step))


def check_two_nets_by_hand_are_one_iteration() -> None:
    """Where a generator and a discriminator learn in turn, a pair of steps is one iteration."""
    generator, discriminator = new_weights(), new_weights()

    def step() -> None:
        loss_of(discriminator).backward()
        made = forward(generator, torch.ones(64, WIDTH))
        forward(discriminator, made.detach()).mean().backward()
        descend(discriminator)
        forget(generator)
        forward(discriminator, made).mean().neg().backward()
        descend(generator)
        forget(discriminator)

    assert_iterations(10, times(step))


def check_gradients_within_a_loss_are_part_of_it() -> None:
    """A penalty on gradients, and layers that are computed again in the backward pass, end no iteration."""
    weights = new_weights()

    def step() -> None:
        inputs = torch.ones(128, WIDTH, requires_grad=True)
        features = checkpoint(forward, weights, inputs, use_reentrant=True)
        loss = forward(weights, inputs).mean()
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (features.mean() + loss + slope.square().mean()).backward()
        descend(weights)
        forget(weights)

    assert_iterations(10, times(step))


def check_functional_steps_are_iterations() -> None:
    """Each call of ``torch.autograd.grad``, ``torch.func.grad`` and its like ends one, nested or mapped."""
    weights = new_weights()
    assert_iterations(10, times(lambda: descend(weights, torch.autograd.grad(loss_of(weights), weights))))

    kept = [weight.detach() for weight in new_weights()]
    of_samples = torch.func.vmap(torch.func.grad(mapped), in_dims=(None, 0))
    transforms = (
        torch.func.grad(loss_of),
        lambda these: torch.func.grad_and_value(loss_of)(these)[0],
        torch.func.grad(lambda these: sum(g.square().mean() for g in torch.func.grad(loss_of)(these)) + loss_of(these)),
        lambda these: [each.mean(0) for each in of_samples(these, torch.ones(2, 64, WIDTH))],
    )
    for number, gradients in enumerate(transforms):

        def step(gradients: Callable[[Weights], Weights] = gradients) -> None:
            for weight, gradient in zip(kept, gradients(kept), strict=True):
                weight.sub_(0.1 * gradient)

        assert_iterations(10, times(step), number)


def mapped(weights: Weights, inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss of one sample."""
    return forward(weights, inputs).square().mean()


def check_a_graph_that_is_compiled_ends_no_iteration() -> None:
    """What a compiler traces, gradients with it, is none of the loop's steps."""
    weights = new_weights()
    compiled = torch.compile(loss_of, backend="aot_eager")

    def step() -> None:
        compiled(weights).backward()
        descend(weights)
        forget(weights)

    assert_iterations(10, times(step))
    whole = torch.compile(torch.func.grad(loss_of), backend="aot_eager", fullgraph=True)
    assert len(whole([weight.detach() for weight in weights])) == len(weights)


if __name__ == "__main__":
    run(dict(globals()))
