"""A fine-tuning with peft over a model of transformers: a frozen base, the same for all, and adapters that learn."""

# ruff: noqa: T201 - a script that talks to its test
import sys

import torch
from frozen_places import outside
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, WORDS, LENGTH = 512, 2048, 16


def model(seed: int) -> torch.nn.Module:
    """Return a Llama of two layers whose adapters are of this seed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 8}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


tuned = model(int(sys.argv[1]))
optimizer = torch.optim.AdamW((one for one in tuned.parameters() if one.requires_grad), lr=1e-3)
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "step":
        words = torch.randint(WORDS, (2, LENGTH))
        loss = tuned(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
    else:
        print(outside(one for one in tuned.parameters() if not one.requires_grad), flush=True)
