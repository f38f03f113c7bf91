"""Computes with transformers, in f32, what a GGUF file says: python gguf_reference.py FILE.gguf TARGET.npz

Standard input holds JSON: ``ids`` of a text, whose logits are kept, ``prompts`` as lists of ids, and the number of ``new``
greedy tokens after each of these.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, target = Path(sys.argv[1]), sys.argv[2]
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([asked["ids"]])).logits[0].numpy()
        tokens = [greedy(model, prompt, asked["new"]) for prompt in asked["prompts"]]
    np.savez(target, logits=logits, tokens=np.array(tokens))


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens after a prompt; tokens that end a text do not stop them."""
    found = []
    past = None
    ids = torch.tensor([prompt])
    while len(found) < count:
        step = model(ids, past_key_values=past, use_cache=True)
        past = step.past_key_values
        found.append(int(step.logits[0, -1].argmax()))
        ids = torch.tensor([found[-1:]])
    return found


if __name__ == "__main__":
    main()
