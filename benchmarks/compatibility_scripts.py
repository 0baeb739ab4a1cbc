"""Twenty scripts of public repositories, what they are fed, and how one of them is run.

The scripts themselves are not part of this project. ``prepare`` takes them from checkouts, one
folder ``OWNER+NAME`` for each repository, and makes a folder for each script: its files, with a few
strings replaced (``edits``), and data beside it. All data is random, from a fixed seed, and only has
the form of the real data.

``python compatibility_scripts.py FOLDER`` runs the script of such a folder in this process. It seeds
what the script does not seed, and prints a digest of every loss at the end: the bits of each number
that PyTorch hands to Python or differentiates, that Keras logs at the end of an epoch, and of the
parameters that a script for JAX ends with. Two runs with one digest had the same losses, bit by bit.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import random
import runpy
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCRIPT = "script"
"""Folder of the script's files, in a script's folder."""
DATA = "data"
START = "start.json"
DIGEST = "losses:"
"""What the line with the digest begins with."""
SEED = 1
ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
"""One core for each job: two jobs do not slow each other down much, and sums have one order."""
QUIET = {
    "MPLBACKEND": "Agg",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "PYTHONUNBUFFERED": "1",
}


@dataclasses.dataclass(frozen=True)
class Edit:
    """A string to replace in a file of the script; it must be there."""

    old: str
    new: str
    file: str = ""
    """Relative to the script's files; the script itself if empty."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A script of a public repository, and how it is run here."""

    name: str
    repository: str
    commit: str
    path: str
    arguments: tuple[str, ...] = ()
    files: str = ""
    """Folder of the repository that the script needs; its own folder if empty."""
    framework: str = "torch"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    data: Callable[[Path], None] | None = None
    """Makes the data below a script's folder."""
    library: str = ""
    """Folder of the repository from which the script imports its own library."""
    paths: tuple[str, ...] = ()
    """Further folders for imports, relative to the script's files."""
    state: tuple[str, ...] = ()
    """Globals of the script whose bits count as losses."""
    fed: str = ""
    """What it is fed, in words."""


# -- data ------------------------------------------------------------------------------------------


def _rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


def _images(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return images with edges and slopes, so that training has something to learn."""
    rng = _rng()
    coarse = rng.integers(0, 256, (count, shape[0] // 4 + 1, shape[1] // 4 + 1, *shape[2:]), dtype=np.uint8)
    return coarse.repeat(4, 1).repeat(4, 2)[:, : shape[0], : shape[1]]


def _labels(count: int, classes: int) -> np.ndarray:
    return _rng().integers(0, classes, count, dtype=np.uint8)


def mnist_idx(train: int, test: int, below: str = "data/MNIST/raw", *, zipped: bool = False) -> Callable[[Path], None]:
    """Return a function that writes random digits in MNIST's own file format."""

    def make(folder: Path) -> None:
        raw = folder / below
        raw.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", train), ("t10k", test)):
            images = struct.pack(">4i", 0x803, count, 28, 28) + _images(count, (28, 28)).tobytes()
            labels = struct.pack(">2i", 0x801, count) + _labels(count, 10).tobytes()
            for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
                path = raw / f"{name}-{kind}-ubyte"
                if zipped:
                    path.with_name(path.name + ".gz").write_bytes(gzip.compress(content, 1))
                else:
                    path.write_bytes(content)

    return make


def mnist_npz(train: int, test: int) -> Callable[[Path], None]:
    """Return a function that writes random digits in the file that Keras downloads."""

    def make(folder: Path) -> None:
        (folder / DATA).mkdir(parents=True, exist_ok=True)
        np.savez(
            folder / DATA / "mnist.npz",
            x_train=_images(train, (28, 28)),
            y_train=_labels(train, 10),
            x_test=_images(test, (28, 28)),
            y_test=_labels(test, 10),
        )

    return make


def imdb_npz(train: int, test: int) -> Callable[[Path], None]:
    """Return a function that writes reviews of random words in the file that Keras downloads."""

    def make(folder: Path) -> None:
        (folder / DATA).mkdir(parents=True, exist_ok=True)
        rng = _rng()

        def reviews(count: int) -> np.ndarray:
            texts = np.empty(count, dtype=object)
            for index in range(count):
                texts[index] = rng.integers(1, 19000, int(rng.integers(100, 300))).tolist()
            return texts

        np.savez(
            folder / DATA / "imdb.npz",
            x_train=reviews(train),
            y_train=_labels(train, 2).astype(np.int64),
            x_test=reviews(test),
            y_test=_labels(test, 2).astype(np.int64),
        )

    return make


def cifar100(train: int, test: int) -> Callable[[Path], None]:
    """Return a function that writes random images in CIFAR-100's own file format."""

    def make(folder: Path) -> None:
        import pickle

        below = folder / DATA / "cifar-100-python-target" / "cifar-100-python"
        below.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", train), ("test", test)):
            images = _images(count, (32, 32, 3)).transpose(0, 3, 1, 2).reshape(count, -1)
            labels = _labels(count, 100).tolist()
            content = {b"data": images, b"fine_labels": labels, b"coarse_labels": labels}
            (below / name).write_bytes(pickle.dumps(content))

    return make


def pictures(**folders: int) -> Callable[[Path], None]:
    """Return a function that writes so many random pictures of 320 x 320 into each folder (``__`` is a ``/``)."""

    def make(folder: Path) -> None:
        from PIL import Image

        images = _images(sum(folders.values()), (320, 320, 3))
        number = 0
        for name, count in folders.items():
            below = folder / name.replace("__", "/")
            below.mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                Image.fromarray(images[number]).save(below / f"{number:04}.jpg")
                number += 1

    return make


def sine_waves(rows: int, length: int) -> Callable[[Path], None]:
    """Return a function that writes the file of generate_sine_wave.py with other sizes."""

    def make(folder: Path) -> None:
        import torch

        period = 20
        begin = _rng().integers(-4 * period, 4 * period, (rows, 1))
        torch.save(np.sin((np.arange(length) + begin) / period), folder / SCRIPT / "traindata.pt")

    return make


def _text(tokens: int, words: int) -> str:
    """Return lines of 20 words, each word often followed by the same one."""
    rng = _rng()
    ids = np.where(rng.random(tokens) < 0.5, np.arange(tokens) % words, rng.integers(0, words, tokens))
    return "\n".join(" ".join(f"w{number}" for number in ids[at : at + 20]) for at in range(0, tokens, 20)) + "\n"


def corpus(train: int, other: int, words: int) -> Callable[[Path], None]:
    """Return a function that writes three texts of random words."""

    def make(folder: Path) -> None:
        (folder / DATA).mkdir(parents=True, exist_ok=True)
        for name, tokens in (("train", train), ("valid", other), ("test", other)):
            (folder / DATA / f"{name}.txt").write_text(_text(tokens, words))

    return make


def tokens(count: int, words: int) -> Callable[[Path], None]:
    """Return a function that writes nanoGPT's files of random tokens."""

    def make(folder: Path) -> None:
        import pickle

        below = folder / SCRIPT / "data" / "random"
        below.mkdir(parents=True, exist_ok=True)
        ids = _rng().integers(0, words, count, dtype=np.uint16)
        ids.tofile(below / "train.bin")
        ids[::-1].tofile(below / "val.bin")
        (below / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": words}))

    return make


def sentences(train: int, validation: int) -> Callable[[Path], None]:
    """Return a function that writes labelled sentences and an untrained BERT of half the usual depth and width."""

    def make(folder: Path) -> None:
        import torch

        make_torchvision_importable()
        import transformers  # type: ignore[import-not-found, unused-ignore]

        words = [f"w{number}" for number in range(8000)]
        model = folder / DATA / "bert"
        model.mkdir(parents=True, exist_ok=True)
        (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
        transformers.BertTokenizerFast(str(model / "vocab.txt")).save_pretrained(model)
        torch.manual_seed(SEED)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
        transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=8005, **sizes)).save_pretrained(
            model
        )
        texts = folder / DATA / "sst2"
        texts.mkdir(exist_ok=True)
        rng = _rng()
        for name, count in (("train", train), ("validation", validation)):
            rows = [" ".join(rng.choice(words, int(rng.integers(20, 60)))) for _ in range(count)]
            lines = [f"{row},{label}" for row, label in zip(rows, _labels(count, 2), strict=True)]
            (texts / f"{name}.csv").write_text("\n".join(["sentence,label", *lines]) + "\n")

    return make


# -- the scripts -----------------------------------------------------------------------------------

PYTORCH: dict[str, Any] = {"repository": "pytorch/examples", "commit": "77f55b912142e11fcfdf5b530231fb9c52f181e8"}
JAX: dict[str, Any] = {
    "repository": "jax-ml/jax",
    "commit": "cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
    "framework": "jax",
    "files": "examples",
    "paths": ("..",),
}
_JAX_DATA = Edit('"/tmp/jax_example_data/"', '"../data/"', "datasets.py")
KERAS: dict[str, Any] = {
    "repository": "keras-team/keras",
    "commit": "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60",
    "framework": "tensorflow",
    "environment": {"KERAS_BACKEND": "tensorflow"},
}

SCRIPTS = (
    Script(
        "lbfgs",
        **PYTORCH,
        path="time_sequence_prediction/train.py",
        arguments=("--steps", "2"),
        edits=(
            Edit("torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),
            Edit("lr=0.8)", "lr=0.8, max_iter=15)"),
        ),
        data=sine_waves(800, 60),
        fed="800 sine waves of 60 values; 15 instead of 20 evaluations a step",
    ),
    Script(
        "imagenet",
        **PYTORCH,
        path="imagenet/main.py",
        arguments=("--dummy", "-a", "resnet18", "-b", "8", "-j", "0", "--epochs", "2", "--seed", "1", "-p", "1"),
        edits=(Edit("1281167", "56"), Edit("FakeData(50000", "FakeData(24")),
        fed="its own fake data, 56 and 24 images, twice",
    ),
    Script(
        "mnist",
        **PYTORCH,
        path="mnist/main.py",
        arguments=("--batch-size", "256", "--test-batch-size", "1000", "--epochs", "3"),
        data=mnist_idx(3584, 2000),
        fed="MNIST files of 3,584 and 2,000 random digits",
    ),
    Script(
        "style",
        **PYTORCH,
        path="fast_neural_style/neural_style/neural_style.py",
        arguments=(
            *("train", "--dataset", "../data/images", "--style-image", "../data/style/0000.jpg"),
            *("--save-model-dir", "../data", "--image-size", "160", "--style-size", "160", "--log-interval", "1"),
            *("--epochs", "1"),
        ),
        edits=(
            Edit("weights=models.VGG16_Weights.IMAGENET1K_V1", "weights=None", "vgg.py"),
            Edit("Image.ANTIALIAS", "Image.LANCZOS", "utils.py"),
        ),
        data=pictures(data__style=1, data__images__some=24),
        fed="24 random pictures; VGG-16 without its trained weights; Pillow's new name of a filter",
    ),
    Script(
        "vae",
        **PYTORCH,
        path="vae/main.py",
        arguments=("--batch-size", "4096", "--epochs", "4", "--log-interval", "1"),
        data=mnist_idx(24576, 4096),
        fed="MNIST files of 24,576 and 4,096 random digits",
    ),
    Script(
        "dcgan",
        **PYTORCH,
        path="dcgan/main.py",
        arguments=("--dataset", "fake", "--niter", "1", "--workers", "0", "--manualSeed", "1", "--outf", "../data"),
        edits=(Edit("FakeData(image_size", "FakeData(size=448, image_size"),),
        fed="its own fake data, 448 images",
    ),
    Script(
        "word-lm",
        **PYTORCH,
        path="word_language_model/main.py",
        arguments=("--data", "../data", "--epochs", "2", "--log-interval", "10", "--batch_size", "40"),
        data=corpus(28000, 4000, 10000),
        fed="three texts of 10,000 random words",
    ),
    Script(
        "siamese",
        **PYTORCH,
        path="siamese_network/main.py",
        arguments=("--batch-size", "256", "--test-batch-size", "256", "--epochs", "2", "--log-interval", "1"),
        data=mnist_idx(1280, 512),
        fed="MNIST files of 1,280 and 512 random digits",
    ),
    Script(
        "super-resolution",
        **PYTORCH,
        path="super_resolution/main.py",
        arguments=("--upscale_factor", "4", "--batchSize", "32", "--testBatchSize", "10", "--threads", "0"),
        data=pictures(script__dataset__BSDS300__images__train=192, script__dataset__BSDS300__images__test=40),
        fed="192 and 40 random pictures",
    ),
    Script(
        "mnist-rnn",
        **PYTORCH,
        path="mnist_rnn/main.py",
        arguments=("--batch-size", "1024", "--test-batch-size", "1024", "--epochs", "2"),
        data=mnist_idx(16384, 4096),
        fed="MNIST files of 16,384 and 4,096 random digits",
    ),
    Script(
        "nanogpt",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        path="train.py",
        arguments=(
            *(
                "--dataset=random",
                "--device=cpu",
                "--compile=False",
                "--dtype=float32",
                "--gradient_accumulation_steps=3",
            ),
            *("--batch_size=6", "--block_size=256", "--n_layer=4", "--n_head=4", "--n_embd=256", "--dropout=0.1"),
            *("--eval_interval=4", "--eval_iters=3", "--max_iters=8", "--warmup_iters=2", "--lr_decay_iters=8"),
        ),
        data=tokens(200_000, 8192),
        fed="200,000 random tokens of 8,192",
    ),
    Script(
        "lightning",
        repository="Lightning-AI/pytorch-lightning",
        commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
        path="examples/pytorch/basics/backbone_image_classifier.py",
        files="examples/pytorch/basics",
        arguments=(
            *("--trainer.max_epochs", "3", "--trainer.limit_train_batches", "8", "--data.batch_size", "4096"),
            *("--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"),
        ),
        edits=(
            Edit("hidden_dim=128", "hidden_dim=2048"),
            Edit(
                "from lightning.pytorch.demos.mnist_datamodule import MNIST", "from torchvision.datasets import MNIST"
            ),
            Edit('path.join(path.dirname(__file__), "..", "..", "Datasets")', '"../data"'),
        ),
        data=mnist_idx(60000, 10000),
        fed="MNIST files of 60,000 and 10,000 random digits, of which it trains on 32,768; a hidden layer of 2,048",
    ),
    Script(
        "trainer",
        repository="huggingface/peft",
        commit="5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        path="examples/frod_finetuning/frod_text_classification.py",
        library="src",
        arguments=(
            *("--model_name_or_path", "../data/bert", "--dataset_name", "../data/sst2", "--output_dir", "../data/out"),
            *("--num_train_epochs", "2", "--use_cpu", "true", "--logging_steps", "1", "--disable_tqdm", "true"),
        ),
        edits=(
            Edit("load_dataset(frod_args.dataset_name, frod_args.task_name)", "load_dataset(frod_args.dataset_name)"),
        ),
        data=sentences(128, 64),
        environment={"HF_HOME": "../data/hf"},
        fed="128 and 64 sentences of random words; an untrained BERT of 6 layers of 384",
    ),
    Script(
        "jax-vae",
        **JAX,
        path="examples/mnist_vae.py",
        edits=(_JAX_DATA, Edit("num_epochs = 100", "num_epochs = 6"), Edit("batch_size = 32", "batch_size = 512")),
        environment={"TMPDIR": "../data"},
        data=mnist_idx(16384, 4096, "data", zipped=True),
        state=("opt_state",),
        fed="MNIST files of 16,384 and 4,096 random digits; batches of 512, 6 epochs",
    ),
    Script(
        "jax-classifier",
        **JAX,
        path="examples/mnist_classifier.py",
        edits=(_JAX_DATA, Edit("num_epochs = 10", "num_epochs = 5"), Edit("batch_size = 128", "batch_size = 1024")),
        data=mnist_idx(16384, 4096, "data", zipped=True),
        state=("params",),
        fed="MNIST files of 16,384 and 4,096 random digits; batches of 1,024, 5 epochs",
    ),
    Script(
        "keras-convnet",
        repository="keras-team/keras-io",
        commit="02cfe8063b505adc073986c91729f22039f77ad0",
        path="examples/vision/mnist_convnet.py",
        framework="tensorflow",
        environment={"KERAS_BACKEND": "tensorflow"},
        edits=(Edit("batch_size = 128", "batch_size = 512"), Edit("epochs = 15", "epochs = 3")),
        data=mnist_npz(10000, 2000),
        fed="Keras' file of MNIST with 10,000 and 2,000 random digits; batches of 512, 3 epochs",
    ),
    Script(
        "keras-autoencoder",
        repository="keras-team/keras-io",
        commit="28033e1c219da0430c695fdcbee81552b8c5f594",
        path="examples/vision/autoencoder.py",
        framework="tensorflow",
        environment={"KERAS_BACKEND": "tensorflow"},
        edits=(
            Edit("epochs=50,\n    batch_size=128", "epochs=2,\n    batch_size=256"),
            Edit("epochs=100,\n    batch_size=128", "epochs=2,\n    batch_size=256"),
        ),
        data=mnist_npz(3072, 768),
        fed="Keras' file of MNIST with 3,072 and 768 random digits; batches of 256, 2 epochs each time",
    ),
    Script(
        "keras-functional",
        **KERAS,
        path="examples/demo_functional.py",
        edits=(Edit("batch_size = 32", "batch_size = 4096"), Edit("50000", "20000")),
        fed="its own random numbers, 20,000 instead of 50,000 rows; batches of 4,096",
    ),
    Script(
        "keras-torch",
        repository="keras-team/keras-io",
        commit="1909c6710cd3f5af6401f1176dcee9e26781b4f3",
        path="examples/nlp/text_classification_with_transformer.py",
        framework="torch",
        environment={"KERAS_BACKEND": "torch"},
        edits=(Edit("batch_size=32, epochs=2", "batch_size=128, epochs=3"),),
        data=imdb_npz(1280, 512),
        fed="Keras' file of IMDB with 1,280 and 512 reviews of random words; batches of 128, 3 epochs",
    ),
    Script(
        "keras-jax",
        repository="keras-team/keras-io",
        commit="07721306fc501d34bafa970491ede96f33f25a77",
        path="examples/vision/image_classification_with_vision_transformer.py",
        framework="jax",
        environment={"KERAS_BACKEND": "jax"},
        edits=(
            Edit("batch_size = 256", "batch_size = 32"),
            Edit("num_epochs = 10 ", "num_epochs = 2 "),
            Edit("image_size = 72", "image_size = 36"),
            Edit("transformer_layers = 8", "transformer_layers = 4"),
            Edit("/tmp/checkpoint", "../data/checkpoint"),  # noqa: S108 - it is replaced
        ),
        data=cifar100(256, 64),
        fed="CIFAR-100 files of 256 and 64 random images; 4 layers, images of 36 x 36, batches of 32, 2 epochs",
    ),
)

PAIRS_APART = 8
"""Each script runs beside the one that is so many places further: all frameworks meet."""
PAIRS = tuple((script.name, SCRIPTS[(at + PAIRS_APART) % len(SCRIPTS)].name) for at, script in enumerate(SCRIPTS))

_TINY = """
import torch

torch.manual_seed({seed})
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(PLACEHOLDER):
    optimizer.zero_grad()
    loss = model(torch.randn(2048, 1024)).square().mean()
    loss.backward()
    optimizer.step()
"""
SMOKE = tuple(
    Script(f"tiny-{seed}", "smoke/smoke", "none", f"tiny{seed}/tiny.py", edits=(Edit("PLACEHOLDER", "12"),))
    for seed in (1, 2)
)
"""Stand for the scripts in a smoke run, which needs no checkout."""


def write_smoke_sources(sources: Path) -> None:
    """Write what a smoke run takes for checkouts."""
    for seed, script in enumerate(SMOKE, 1):
        path = sources / script.repository.replace("/", "+") / script.path
        path.parent.mkdir(parents=True)
        path.write_text(_TINY.format(seed=seed))


# -- preparing -------------------------------------------------------------------------------------


def prepare(script: Script, sources: Path, folder: Path) -> None:
    """Make the folder of one script from a checkout of its repository.

    Raises:
        ValueError: The checkout's file is not the one that the edits are for.
        OSError: A file is missing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files = Path(script.files or Path(script.path).parent)
    # One for JAX is imported as a package by the folder's own name.
    inside = folder / (files.name if script.paths else SCRIPT)
    checkout = sources / script.repository.replace("/", "+")
    shutil.copytree(checkout / files, inside, ignore=shutil.ignore_patterns(".git"))
    main = Path(script.path).relative_to(files)
    for edit in script.edits:
        path = inside / (edit.file or main)
        text = path.read_text()
        if edit.old not in text:
            message = f"{path.name} of {script.name} has no {edit.old!r}: is it that commit?"
            raise ValueError(message)
        path.write_text(text.replace(edit.old, edit.new))
    (folder / DATA).mkdir(exist_ok=True)
    (inside / "results").mkdir(exist_ok=True)
    if script.data is not None:
        script.data(folder)
    start = {
        "inside": inside.name,
        "main": str(main),
        "arguments": script.arguments,
        "framework": script.framework,
        "paths": [".", *script.paths],
        "state": script.state,
    }
    if script.library:
        start["paths"] = [".", str((checkout / script.library).resolve())]
    (folder / START).write_text(json.dumps(start))


def environment(script: Script) -> dict[str, str]:
    """Return what a script's process finds in its environment beside the usual."""
    return {**ONE_CORE, **QUIET, **script.environment}


def command(script: Script, folder: Path) -> list[str]:
    """Return the command that runs a prepared script."""
    variables = [f"{name}={value}" for name, value in environment(script).items()]
    return ["env", *variables, sys.executable, str(Path(__file__).resolve()), str(folder.resolve())]


# -- running one -----------------------------------------------------------------------------------


class Digest:
    """Of all losses so far."""

    _sha: Any
    count: int
    last: float

    def __init__(self) -> None:
        """Begin with none."""
        self._sha = hashlib.sha256()
        self.count = 0
        self.last = float("nan")

    def add(self, value: float) -> None:
        """Take one more number."""
        self._sha.update(struct.pack("<d", value))
        self.count += 1
        self.last = value

    def add_array(self, array: object) -> None:
        """Take one more array, bit by bit."""
        self._sha.update(np.asarray(array).tobytes())
        self.count += 1

    def line(self) -> str:
        """Return what the script's last line says: how many, their digest, and the last number."""
        return f"{DIGEST} {self.count} {self._sha.hexdigest()[:16]} {self.last:.6g}"


_kept: list[Any] = []


def make_torchvision_importable() -> None:
    """Declare the operators that torchvision looks for when it is imported.

    The wheel on PyPI is built for CUDA. Beside a PyTorch for the CPU its operators are missing. No
    script here uses one.
    """
    import importlib.metadata

    import torch

    try:
        version = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    if torch.version.cuda is None and "+" not in version:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)  # it goes when this goes


def _watch_torch(digest: Digest) -> None:
    import torch

    make_torchvision_importable()
    tensor_class: Any = torch.Tensor
    item, backward = tensor_class.item, tensor_class.backward

    def watched_item(tensor: torch.Tensor) -> object:
        value: object = item(tensor)
        if isinstance(value, float):
            digest.add(value)
        return value

    def watched_backward(tensor: torch.Tensor, *arguments: object, **named: object) -> None:
        digest.add(item(tensor.detach()))
        backward(tensor, *arguments, **named)

    tensor_class.item = watched_item
    tensor_class.backward = watched_backward


def _watch_keras(digest: Digest, data: Path) -> None:
    import keras
    from keras.src.callbacks.callback_list import CallbackList
    from keras.src.datasets import cifar100, imdb, mnist

    keras.utils.set_random_seed(SEED)

    def stored(fname: str, **_: object) -> str:
        return str(data / fname)

    for module in (cifar100, imdb, mnist):
        module.get_file = stored
    epoch_ends, test_ends = CallbackList.on_epoch_end, CallbackList.on_test_end

    def add(logs: dict[str, Any] | None) -> None:
        for value in (logs or {}).values():
            digest.add(float(value))

    def on_epoch_end(callbacks: object, epoch: int, logs: dict[str, Any] | None = None) -> None:
        add(logs)
        epoch_ends(callbacks, epoch, logs)

    def on_test_end(callbacks: object, logs: dict[str, Any] | None = None) -> None:
        add(logs)
        test_ends(callbacks, logs)

    CallbackList.on_epoch_end, CallbackList.on_test_end = on_epoch_end, on_test_end


def run(folder: Path) -> None:
    """Run a prepared script in this process, then print the digest of its losses."""
    start = json.loads((folder / START).read_text())
    inside = folder / start["inside"]
    os.chdir(inside)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the scripts use it
    digest = Digest()
    if start["framework"] == "torch":
        _watch_torch(digest)
    if "KERAS_BACKEND" in os.environ or start["framework"] == "tensorflow":
        _watch_keras(digest, folder / DATA)
    main = inside / start["main"]
    sys.argv = [start["main"], *start["arguments"]]
    sys.path[:0] = [str(main.parent), *(str((inside / path).resolve()) for path in start["paths"])]
    end = runpy.run_path(str(main), run_name="__main__")
    if start["state"]:
        import jax  # type: ignore[import-not-found, unused-ignore]

        for name in start["state"]:
            for leaf in jax.tree.leaves(end[name]):
                digest.add_array(leaf)
    print(digest.line(), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
