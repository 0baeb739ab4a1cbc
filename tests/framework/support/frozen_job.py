"""A PyTorch job with a frozen base and a head that learns; it does what it is told on stdin, line by line."""

import copy
import ctypes
import os
import sys

import torch
from frozen_places import is_outside, obey

import zico

WIDTH = 1024
LAYERS = 6


def model(seed: int) -> torch.nn.Module:
    """Return a base that is the same for all, 4 MiB a layer, and a head of this seed."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    base = torch.nn.Sequential(*layers).requires_grad_(requires_grad=False)
    torch.manual_seed(seed)
    return torch.nn.Sequential(base, torch.nn.Linear(WIDTH, 4))


class Job:
    """What can be asked of it."""

    def __init__(self, seed: int) -> None:
        """Make the model and the optimizer."""
        self.model = model(seed)
        self.base, self.head = self.model
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.01)
        self.kept = None

    def step(self) -> str:
        """Train for an iteration; returns the loss to the last bit."""
        loss = self.model(torch.randn(32, WIDTH)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()

    def share(self) -> int:
        """Share the base now; returns what jobs have in common then."""
        assert zico.share(self.base) is self.base
        found = zico.status()
        return 0 if found is None else found.shared_bytes

    def there(self) -> int:
        """Return how many of the base's layers lie outside the pool."""
        return sum(is_outside(layer.weight.data_ptr()) for layer in self.base)

    def write(self) -> float:
        """Change a weight of the base in place."""
        self.base[0].weight[0, 0] = 7.0
        return self.base[0].weight[0, 0].item()

    def sum(self) -> str:
        """Return what the base has, to the last bit."""
        return " ".join(layer.weight.sum(dtype=torch.float64).item().hex() for layer in self.base)

    def unfreeze(self) -> None:
        """Let the last layer of the base learn, too."""
        self.base[-1].requires_grad_(requires_grad=True)
        self.optimizer.add_param_group({"params": self.base[-1].parameters()})

    def keep(self) -> None:
        """Refer to the memory of the first layer by another tensor."""
        self.kept = self.base[0].weight.detach()

    def copy(self) -> str:
        """Share a copy of the base, too, and clear that; returns what the base has."""
        twin = copy.deepcopy(self.base)
        zico.share(twin)
        twin[0].weight.zero_()
        return self.sum()

    def alias(self) -> bool:
        """Write by an alias that is older than the next end of an iteration; tells whether the weight still has it."""
        older = self.base[0].weight.detach()
        older.add_(1.0)
        self.step()
        older.add_(1.0)
        return torch.equal(older, self.base[0].weight)

    def data(self) -> None:
        """Change a weight without changing its version."""
        self.base[0].weight.data.mul_(2.0)

    def infer(self) -> str:
        """Compute for the first time in inference mode, then let a layer learn."""
        with torch.inference_mode():
            self.model(torch.randn(1, WIDTH))
        self.unfreeze()
        return f"{self.base[-1].weight.is_inference()} {self.there()}"

    def elsewhere(self) -> int:
        """Compute for the first time where tensors are made on another device."""
        with torch.device("meta"):
            torch.nn.Linear(4, 4)(torch.empty(2, 4))
        return self.share()

    def compiled(self) -> str:
        """Compute for the first time within one graph."""
        compiled = torch.compile(lambda rows: self.model(rows).sum(), fullgraph=True, backend="eager")
        return compiled(torch.ones(1, WIDTH)).item().hex()

    def drop(self) -> None:
        """Let the base go."""
        self.base = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(requires_grad=False)
        self.model = torch.nn.Sequential(self.base, self.head)

    def fork_first(self) -> str:
        """Compute for the first time in a child; returns how many of the base's layers lie outside the pool there."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            self.model(torch.ones(1, WIDTH))
            os.write(writes, str(self.there()).encode())
            os._exit(0)
        os.close(writes)
        os.waitpid(child, 0)
        with os.fdopen(reads) as told:
            return told.read()

    def fork(self) -> str:
        """Read the base in a child, which then writes to it."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            said = self.sum()
            ctypes.memset(self.base[0].weight.data_ptr(), 0, 64)
            os.write(writes, said.encode())
            os._exit(0)
        os.close(writes)
        os.waitpid(child, 0)
        with os.fdopen(reads) as told:
            return told.read()


if __name__ == "__main__":
    obey(Job(int(sys.argv[1])))
