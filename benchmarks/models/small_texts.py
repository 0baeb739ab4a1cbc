"""Small transformers of texts from the package transformers, random by configuration, and adapters of low rank.

Sources, in the order of ``models``: Radford 2019; Devlin 2018; Lewis 2019; Touvron 2023; Zhang
2022; Hu 2021 for the two adapters.
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from small import Small, tokens
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = 2000
_LENGTH = 64
_WIDTH, _LAYERS, _HEADS = 128, 4, 4
_SIZES = {
    "vocab_size": _WORDS,
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 4 * _WIDTH,
}
_RANK = 8


class _Text(nn.Module):
    """A model of the package that predicts words, with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x, labels=x).loss

    def checkpoint_blocks(self) -> None:
        """Let the blocks compute again for the backward pass, as the package does it."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()


def _made(family: str, kind: str, **sizes: Any) -> Callable[[], nn.Module]:  # noqa: ANN401 - a configuration's
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**sizes)
        model = getattr(transformers, f"{family}{kind}")(config)
        model.train()
        return _Text(model)

    return make


class _LowRank(nn.Module):
    """A frozen linear layer and a product of two thin matrices that is added to it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def _adapted(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what freezes a model and puts adapters beside its inner linear layers."""

    def made() -> nn.Module:
        model = make()
        model.requires_grad_(requires_grad=False)
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and layer.out_features != _WORDS:
                    setattr(parent, name, _LowRank(layer))
        return model

    return made


def models() -> dict[str, Small]:
    """Return the models by name; none without the package."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    gpt = {"vocab_size": _WORDS, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": _LENGTH}
    gpt |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    bart = {"d_model": _WIDTH, "encoder_layers": 3, "decoder_layers": 3, "max_position_embeddings": _LENGTH}
    bart |= {f"{part}_ffn_dim": 4 * _WIDTH for part in ("encoder", "decoder")}
    bart |= {f"{part}_attention_heads": _HEADS for part in ("encoder", "decoder")}
    opt = {"ffn_dim": 4 * _WIDTH, "word_embed_proj_dim": _WIDTH, "max_position_embeddings": _LENGTH}
    wide = {**_SIZES, "hidden_size": 256, "intermediate_size": 1024}
    made = {
        "GPT-2": _made("GPT2", "LMHeadModel", **gpt),
        "BERT": _made("Bert", "ForMaskedLM", **_SIZES),
        "BART": _made("Bart", "ForConditionalGeneration", vocab_size=_WORDS, **bart),
        "Llama": _made("Llama", "ForCausalLM", **_SIZES, num_key_value_heads=2),
        "OPT": _made("OPT", "ForCausalLM", **_SIZES, **opt),
    }
    found = {name: Small("language", make, tokens(_WORDS, _LENGTH), (12, 16, 24)) for name, make in made.items()}
    adapted = {
        "Llama, LoRA": _made("Llama", "ForCausalLM", **wide, num_key_value_heads=2),
        "OPT, LoRA": _made("OPT", "ForCausalLM", **wide, **{**opt, "ffn_dim": 1024, "word_embed_proj_dim": 256}),
    }
    for name, make in adapted.items():
        found[name] = Small("adapters", _adapted(make), tokens(_WORDS, _LENGTH), (12, 16, 24))
    return found
