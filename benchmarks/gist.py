"""How much do a job's saved tensors take encoded, by who reads them, and how fast are the encodings?

Three networks train for some iterations on data that come with their packages. Then the graph of
one iteration is walked: each tensor of 4-byte floats that a backward pass reads is put into a
compressed tier and got back, with each encoding that it may have. Tensors with the same readers are
a row. Where only ReLU's result and pooling's input are read, signs are enough, and gradients are the
same bits; fewer bits change gradients.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import gpt_job
import torch
from torch import nn
from torch.nn import functional

from zico.base.units import MIB, format_bytes
from zico.tiers.destinations import TierWish
from zico.tiers.encodings import FP8, FP10, FP16, NAMES, SIGNS, ZEROS
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

QUESTION = "How much do a job's saved tensors take encoded, by who reads them, and how fast are the encodings?"
LEAST_BYTES = 1 << 18
SIGNS_ARE_ENOUGH = {
    ("Relu", "result"),
    ("MaxPool2DWithIndices", "self"),
    ("AvgPool2D", "self"),
    ("AdaptiveAvgPool2D", "self"),
}
"""Who reads no more than signs; ``torch_encoding_checks.py`` shows that gradients are the same."""
FEWER = (FP16, FP10, FP8)
IMAGE = 32

sys.path.insert(0, str(common.ROOT / "examples"))
digits_resnet: Any = importlib.import_module("digits_resnet")


class Net(NamedTuple):
    """A network in training."""

    model: nn.Module
    loss: Callable[[], Tensor]


def _digits(size: int, batch: int) -> Callable[[], tuple[Tensor, Tensor]]:
    data, generator = digits_resnet.Digits(), torch.Generator().manual_seed(1)

    def drawn() -> tuple[Tensor, Tensor]:
        at = torch.randint(len(data), (batch,), generator=generator)
        return functional.interpolate(data.images[at], size=size, mode="bilinear"), data.labels[at]

    return drawn


def _classifier(model: nn.Module, size: int, batch: int) -> Net:
    drawn = _digits(size, batch)

    def loss() -> Tensor:
        images, labels = drawn()
        return functional.cross_entropy(model(images), labels)

    return Net(model, loss)


def resnet() -> Net:
    """Return the example's network: ReLU behind batch norm, ahead of convolutions."""
    return _classifier(digits_resnet.ResNet(20, 16), 16, 128)


def vgg() -> Net:
    """Return VGG-11's shape: ReLU ahead of convolutions and of pooling, then dropout."""
    layers: list[nn.Module] = []
    before = 1
    for width, n in ((32, 1), (64, 1), (128, 2), (256, 2)):
        for _ in range(n):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        layers.append(nn.MaxPool2d(2))
    linear = (nn.Flatten(), nn.Linear(4 * before, 1024), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(1024, 10))
    return _classifier(nn.Sequential(*layers, *linear), IMAGE, 128)


def gpt() -> Net:
    """Return a transformer with plain attention and GELU."""
    length, text = 256, gpt_job.text()
    model, generator = gpt_job.GPT(length, 128, 4, 4, 0.1), torch.Generator().manual_seed(1)

    def loss() -> Tensor:
        at = torch.randint(len(text) - length - 1, (8,), generator=generator)
        rows = torch.stack([text[begin : begin + length + 1] for begin in at.tolist()])
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Net(model, loss)


NETS = {"resnet": resnet, "vgg": vgg, "gpt": gpt}


def trained(net: Net, iterations: int) -> Tensor:
    """Train; returns the loss of one iteration more, with its graph."""
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=1e-3)
    for _ in range(iterations):
        optimizer.zero_grad()
        net.loss().backward()
        optimizer.step()
    return net.loss()


def readers(net: Net, loss: Tensor) -> dict[tuple[tuple[str, str], ...], list[Tensor]]:
    """Return the saved tensors of a graph by who reads them: names of operations, and of what they save."""
    parameters = {each.untyped_storage().data_ptr() for each in net.model.parameters()}
    by_storage: dict[int, tuple[Tensor, set[tuple[str, str]]]] = {}
    for node in _nodes(loss.grad_fn):
        for name in (name for name in dir(node) if name.startswith("_saved_")):
            tensor = getattr(node, name)
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= LEAST_BYTES and storage.data_ptr() not in parameters:
                    reader = type(node).__name__.partition("Backward")[0], name.removeprefix("_saved_")
                    by_storage.setdefault(storage.data_ptr(), (tensor, set()))[1].add(reader)
    found: dict[tuple[tuple[str, str], ...], list[Tensor]] = {}
    for tensor, who in by_storage.values():
        whole = torch.empty(0).set_(tensor.untyped_storage())
        found.setdefault(tuple(sorted(who)), []).append(whole)
    return found


def _nodes(root: Any) -> Iterator[Any]:  # noqa: ANN401 - autograd's own
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def measure(tensors: list[Tensor], encoding: int, repeat: int) -> dict[str, float]:
    """Return what tensors take encoded, as a share, and the median bytes a second out and in."""
    total = sum(each.nbytes for each in tensors)
    out_s, in_s, used = [], [], 0
    with TierStack.create((TierWish("compressed", 2 * total + 32 * MIB),), block_bytes=MIB) as stack:
        back = torch.empty(max(each.numel() for each in tensors))
        for _ in range(repeat):
            began_s = time.perf_counter()
            tickets = [stack.put(each.data_ptr(), each.nbytes, encoding) for each in tensors]
            out_s.append(time.perf_counter() - began_s)
            if min(tickets) < 0:
                raise SystemExit(f"the tier refused a tensor: {stack.usage()}")
            used = stack.usage()[0].used_bytes
            began_s = time.perf_counter()
            for ticket, each in zip(tickets, tensors, strict=True):
                stack.get(ticket, back.data_ptr(), each.nbytes)
            in_s.append(time.perf_counter() - began_s)
            for ticket, each in zip(tickets, tensors, strict=True):
                stack.get(ticket, back.data_ptr(), each.nbytes)
                _check(encoding, back[: each.numel()], each)
                stack.drop(ticket)
    return {"share": used / total, "out": total / statistics.median(out_s), "in": total / statistics.median(in_s)}


def _check(encoding: int, got: Tensor, put: Tensor) -> None:
    expected = put if encoding == ZEROS else (put > 0).float() if encoding == SIGNS else None
    if expected is not None and not torch.equal(got, expected):
        raise SystemExit(f"{NAMES[encoding]}: a tensor came back as something else")


def row(who: tuple[tuple[str, str], ...], tensors: list[Tensor], repeat: int) -> dict[str, Any]:
    """Measure tensors that the same operations read, with every encoding that they may have."""
    enough = set(who) <= SIGNS_ARE_ENOUGH
    zeros = sum(int((each == 0).sum()) for each in tensors) / sum(each.numel() for each in tensors)
    return {
        "read_by": [f"{operation}.{name}" for operation, name in who],
        "bytes": sum(each.nbytes for each in tensors),
        "zeros": zeros,
        "encodings": {NAMES[it]: measure(tensors, it, repeat) for it in (ZEROS, *([SIGNS] if enough else FEWER))},
    }


def whole_share(rows: list[dict[str, Any]], fewer: str | None = None) -> float:
    """Return what all tensors take: signs where they are enough, else without zeros, or in fewer bits where asked."""
    taken = 0.0
    for each in rows:
        found = each["encodings"]
        shares = [1.0, found["zeros"]["share"], found.get("signs", {}).get("share", math.inf)]
        taken += each["bytes"] * min(*shares, found[fewer]["share"] if fewer in found else math.inf)
    return taken / sum(each["bytes"] for each in rows)


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = []
    for name, rows in result["nets"].items():
        cells = [
            (
                ", ".join(each["read_by"]),
                format_bytes(each["bytes"]),
                f"{each['zeros']:.0%}",
                encoding,
                f"{found['share']:.2f}",
                f"{found['out'] / 2**30:.1f}",
                f"{found['in'] / 2**30:.1f}",
            )
            for each in rows
            for encoding, found in each["encodings"].items()
        ]
        header = (f"{name}: read by", "size", "zeros", "encoding", "share", "out, GiB/s", "in, GiB/s")
        all_of = ", ".join(f"with {NAMES[it]} {whole_share(rows, NAMES[it]):.2f}" for it in FEWER)
        parts += [common.table(header, cells), f"All of {name}: {whole_share(rows):.2f} without loss, {all_of}.\n"]
    return "\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9, help="copies of each tensor each way")
    parser.add_argument("--iterations", type=int, default=30, help="of training ahead of them")
    options = parser.parse_args()
    if options.smoke:
        options.repeat, options.iterations = 1, 1
    torch.set_num_threads(1)
    result = common.document("gist", QUESTION, {"repeat": options.repeat, "iterations": options.iterations})
    result["nets"] = {}
    for name in ["vgg"] if options.smoke else NETS:
        common.note(f"{name}: trains")
        torch.manual_seed(0)
        net = NETS[name]()
        found = readers(net, trained(net, options.iterations))
        result["nets"][name] = [row(who, tensors, options.repeat) for who, tensors in found.items()]
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
