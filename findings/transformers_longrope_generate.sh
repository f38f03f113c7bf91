#!/usr/bin/env bash
# transformers 5.5.4: generate() of a LongRoPE model forgets the text when it becomes longer than original_max_position_embeddings.
#
# Expected: each greedy token is the most likely one after a forward pass over the whole text so far, on both sides of the limit,
# whose long factors need all keys anew.
# Seen: up to the limit it is. At the limit generate() drops its cache, and passes only the newest token: from there on, each token is
# the one that follows a text which begins at the limit, whatever stood before it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.5.4
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from transformers import Phi3Config, Phi3ForCausalLM

LIMIT = 24
factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
config = Phi3Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, original_max_position_embeddings=LIMIT, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT, **factors},
)
torch.manual_seed(0)
model = Phi3ForCausalLM(config).eval()
with torch.no_grad():
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(6)


def whole(text):
    """The most likely token after a forward pass over a whole text."""
    with torch.no_grad():
        return int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())


print(f"transformers {version('transformers')}, torch {version('torch')}, limit {LIMIT}")
num_right_before = num_right_after = num_after = num_before = 0
for seed in range(8):
    prompt = torch.randint(3, 512, (1, LIMIT - 4), generator=torch.Generator().manual_seed(seed))
    text = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=2)[0].tolist()
    for place in range(LIMIT - 4, len(text)):
        is_right = text[place] == whole(text[:place])
        if place <= LIMIT:
            num_before += 1
            num_right_before += is_right
        else:
            num_after += 1
            num_right_after += is_right
print(f"up to the limit {num_right_before} of {num_before} tokens are those of the whole text, above it {num_right_after} of {num_after}")
assert num_right_before == num_before, "the behaviour has changed"
assert num_right_after < num_after // 2, "the behaviour has changed"
PYTHON
