#!/usr/bin/env bash
# openvino_tokenizers 2026.4.1: a word of a BPE vocabulary that no merge builds is found inside other words.
#
# Expected: the converted tokenizer gives the ids of the Hugging Face tokenizer that it was made of. There, the word "abc" is reached
# from the text "xabcy" only by merges; the one merge "a b" leaves x, ab, c and y.
# Seen: x, abc and y. The conversion says nothing. "abcab" becomes abc, ab in place of ab, c, ab.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openvino==2026.4.1 openvino-tokenizers==2026.4.1 tokenizers==0.22.2 transformers==5.5.4 jinja2==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import openvino as ov
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<unk>", *"abcxyz", "ab", "abc"]
plain = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [("a", "b")], unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
converted = convert_tokenizer(PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>"))
run = ov.Core().compile_model(converted, "CPU")
print(f"openvino_tokenizers {version('openvino-tokenizers')}, tokenizers {version('tokenizers')}")
found = {}
for text in ("xabcy", "abcab", "xaby"):
    theirs = plain.encode(text).ids
    ids = run([text])["input_ids"][0].tolist()
    found[text] = [words[each] for each in theirs], [words[each] for each in ids]
    print(f"{text}: tokenizers {found[text][0]}, converted {found[text][1]}")
assert found["xabcy"] == (["x", "ab", "c", "y"], ["x", "abc", "y"]), "the behaviour has changed"
assert found["abcab"] == (["ab", "c", "ab"], ["abc", "ab"]), "the behaviour has changed"
assert found["xaby"][0] == found["xaby"][1], "the behaviour has changed"
PYTHON
