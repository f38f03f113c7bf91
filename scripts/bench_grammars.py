"""Measures grammars: llguidance beside xgrammar, the share of masks that the device hides, and JSON beside free text.

python scripts/bench_grammars.py masks MODEL_DIR        # both libraries on the model's vocabulary; nothing is run
python scripts/bench_grammars.py speed MODEL_DIR        # tokens per second of one client, JSON and free text in turns
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 128},
        "city": {"enum": ["Dublin", "Dubai", "Munich"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "age", "city", "tags", "address"],
}
SAMPLE = {
    "name": "Ada Lovelace of Ockham", "age": 36, "city": "Dublin", "tags": ["mathematics", "engines", "a long line of text"],
    "address": {"street": "St James's Square, London", "number": 12},
}  # fmt: skip
ARITHMETIC = 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"\n'
CASES: dict[str, tuple[str, str, str]] = {
    "JSON schema": ("json_schema", json.dumps(PERSON), json.dumps(SAMPLE)),
    "any JSON object": ("json_schema", '{"type": "object", "additionalProperties": true}', json.dumps(SAMPLE)),
    "regex": ("regex", r"[a-zA-Z0-9._%+-]{1,64}@[a-z]{1,64}\.[a-z]{1,10}", "ada.lovelace@analytical.org"),
    "EBNF": ("ebnf", ARITHMETIC, "(12+345)-(6+(78-9))"),
}


CHANGES = {"json_schema": " ", "regex": "|z", "ebnf": "\n"}
"""What is appended to a grammar so that it has to be compiled again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("masks", "speed"))
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--tokenizer", type=Path, help="a directory with another tokenizer (default: the model's own)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    (bench_masks if options.what == "masks" else bench_speed)(options)


def mask_figures(model: Path, rounds: int = 3, tokens: int = 96) -> dict[str, float]:
    """Return figures of masks for a model that answers in JSON: its number of tokens, and times.

    A model whose logits are wider than its vocabulary, as that of ``make_bench_model.py``, gets a vocabulary of their width.
    ``first_mask_ms`` is the time to compile the schema and make its first mask, ``mask_us`` that of each further mask, and
    ``hidden`` the share of the time of masks that passed while the device ran.
    """
    from staticllm import StaticLLMPipeline
    from staticllm.pipelines.engine.request import EngineText
    from staticllm.pipelines.generation.grammar import Grammar
    from staticllm.pipelines.grammars.compiler import GrammarCompiler
    from staticllm.pipelines.grammars.vocabulary import read_vocabulary

    length: dict[str, Any] = {"MAX_PROMPT_LEN": 256, "MIN_RESPONSE_LEN": max(tokens, 128)}
    firsts: list[float] = []
    masks: list[float] = []
    with StaticLLMPipeline(model, "CPU", **length) as pipe:
        size = pipe.engine.runner.cache.layout.vocab_size
        vocabulary = enlarged(read_vocabulary(pipe.get_tokenizer()), size)
        compiler = GrammarCompiler(lambda: vocabulary)
        assert pipe.engine.steps.text is not None
        pipe.engine.steps.text = EngineText(pipe.engine.steps.text.decode, compiler)
        prompt = np.array(vocabulary.encode("Write about a person."))
        for round_ in range(rounds):  # in token ids, because nothing decodes the tokens that are made up
            pipe.generate(prompt, rng_seed=round_ + 1, do_sample=True, json_schema=PERSON, max_new_tokens=tokens)
        for round_ in range(rounds):
            changed = Grammar("json_schema", json.dumps(PERSON) + CHANGES["json_schema"] * (round_ + 1))
            first, times = llguidance_run(compiler, changed, compiler.vocabulary.encode(json.dumps(SAMPLE)), size)
            firsts.append(first)
            masks += times
        hidden = compiler.times.hidden_share
    return {
        "num_tokens": size, "first_mask_ms": statistics.median(firsts) * 1e3, "mask_us": statistics.median(masks) * 1e6,
        "hidden": hidden,
    }  # fmt: skip


def enlarged(vocabulary: Any, size: int) -> Any:
    """Return a vocabulary of ``size`` tokens: those that are there, and pairs of them, the shortest first."""
    known = list(vocabulary.tokens)
    words = sorted({token for token in known if token.strip(b" ").isalpha()}, key=lambda token: (len(token), token))
    ends = [token for token in words if not token.startswith(b" ")]
    there = set(known)
    pairs = (first + last for last in ends for first in words)
    more = (token for token in pairs if token not in there and not there.add(token))  # type: ignore[func-returns-value]
    return replace(vocabulary, tokens=(*known, *islice(more, max(0, size - len(known)))))


def bench_masks(options: argparse.Namespace) -> None:
    """Print the times of both libraries: to compile a grammar and make its first mask, and for each further mask."""
    import openvino_genai as genai

    from staticllm.pipelines.generation.grammar import Grammar
    from staticllm.pipelines.grammars.compiler import GrammarCompiler
    from staticllm.pipelines.grammars.vocabulary import read_vocabulary

    tokenizer, begin = genai.Tokenizer(options.model), time.perf_counter()
    vocabulary = read_vocabulary(tokenizer)
    print(f"vocabulary of {len(vocabulary.tokens)} tokens read in {time.perf_counter() - begin:.2f} s")
    size = len(vocabulary.tokens)
    print("| grammar | library | first mask, ms | mask, median us | 95 % us | largest us |\n|---|---|---|---|---|---|")
    ours, theirs = GrammarCompiler(lambda: vocabulary), xgrammar_masks(vocabulary)
    begin = time.perf_counter()
    ours.matcher(Grammar("regex", "a"), size)
    prepared = time.perf_counter() - begin
    for name, (kind, text, sample) in CASES.items():
        tokens = vocabulary.encode(sample)
        for library in ("llguidance", "xgrammar"):
            firsts, masks = [], []
            for round_ in range(options.rounds):
                if library == "llguidance":
                    changed = Grammar(kind, text + CHANGES[kind] * round_)  # type: ignore[arg-type]  # nothing is kept from before
                    first, times = llguidance_run(ours, changed, tokens, size)
                else:
                    first, times = theirs(kind, text, tokens)
                firsts.append(first)
                masks += times
            ordered = sorted(masks)
            print(
                f"| {name} | {library} | {statistics.median(firsts) * 1e3:.1f} | {statistics.median(masks) * 1e6:.0f} "
                f"| {ordered[int(len(ordered) * 0.95)] * 1e6:.0f} | {ordered[-1] * 1e6:.0f} |"
            )
    print(f"llguidance read the vocabulary in {prepared:.2f} s")


def llguidance_run(compiler: Any, grammar: Any, tokens: Sequence[int], size: int) -> tuple[float, list[float]]:
    begin = time.perf_counter()
    matcher = compiler.matcher(grammar, size)
    matcher.allowed()
    first, times = time.perf_counter() - begin, []
    for token in tokens:
        begin = time.perf_counter()
        matcher.accept([token])
        if not matcher.forced():
            matcher.allowed()
        times.append(time.perf_counter() - begin)
    return first, times


def xgrammar_masks(vocabulary: Any) -> Callable[[str, str, Sequence[int]], tuple[float, list[float]]]:
    import xgrammar as xgr

    begin = time.perf_counter()
    info = xgr.TokenizerInfo(
        list(vocabulary.tokens), xgr.VocabType.RAW, vocab_size=len(vocabulary.tokens), stop_token_ids=[vocabulary.end]
    )
    compiler = xgr.GrammarCompiler(info, cache_enabled=False)
    print(f"xgrammar read the vocabulary in {time.perf_counter() - begin:.2f} s")

    def run(kind: str, text: str, tokens: Sequence[int]) -> tuple[float, list[float]]:
        compilers = (compiler.compile_json_schema, compiler.compile_regex, compiler.compile_grammar)
        compile_ = compilers[("json_schema", "regex", "ebnf").index(kind)]
        begin = time.perf_counter()
        matcher = xgr.GrammarMatcher(compile_(text))
        bits = np.zeros((1, (len(vocabulary.tokens) + 31) // 32), np.int32)
        matcher.fill_next_token_bitmask(bits)
        first, times = time.perf_counter() - begin, []
        for token in tokens:
            begin = time.perf_counter()
            assert matcher.accept_token(token), "the sample does not match"
            matcher.fill_next_token_bitmask(bits)
            times.append(time.perf_counter() - begin)
        return first, times

    return run


def bench_speed(options: argparse.Namespace) -> None:
    """Print what a token of free text and of JSON takes, in turns in one process, and the share of masks that was hidden.

    The times are those between two steps. Their lower percentiles say most on a machine that does other things too.
    """
    import openvino_genai as genai

    from staticllm import StaticLLMPipeline

    short = json.loads(json.dumps(PERSON).replace('"type": "string"', '"type": "string", "maxLength": 24'))
    schema = {"type": "array", "items": short, "minItems": 1}  # random text has no end
    length: dict[str, Any] = {"MAX_PROMPT_LEN": 256, "MIN_RESPONSE_LEN": max(options.tokens, 128)}
    tokenizer = genai.Tokenizer(options.tokenizer or options.model)
    asked = {"max_new_tokens": options.tokens, "apply_chat_template": False, "do_sample": True}
    kinds: dict[str, dict[str, Any]] = {"free text": {"ignore_eos": True}, "JSON": {"json_schema": schema}}
    periods: dict[str, list[float]] = {name: [] for name in kinds}
    num_tokens, num_steps = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    with StaticLLMPipeline(options.model, "CPU", tokenizer=tokenizer, **length) as pipe:
        pipe.wait_until_complete()
        for round_ in range(options.rounds + 1):
            for name, more in kinds.items():
                with pipe.record() as trace:
                    answer = pipe.generate("Write about a person.", rng_seed=round_ + 1, **asked, **more)
                steps = [step for step in trace.steps if step.decode]
                if round_:  # the first round compiles
                    periods[name] += [after.start - before.start for before, after in pairwise(steps)]
                    num_tokens[name] += len(answer.tokens[0]) - 1
                    num_steps[name] += len(steps)
        assert pipe.engine.steps.text is not None and pipe.engine.steps.text.grammars is not None
        times = pipe.engine.steps.text.grammars.times
    for share in (0.05, 0.25, 0.5):
        found = {name: sorted(values)[int(len(values) * share)] * 1e3 for name, values in periods.items()}
        per_token = {name: found[name] * num_steps[name] / num_tokens[name] for name in kinds}
        print(
            f"{share:.0%}: free text {found['free text']:.2f} ms per step, JSON {found['JSON']:.2f}; tokens per second of JSON: "
            f"{per_token['free text'] / per_token['JSON']:.3f} of free text"
        )
    print(f"steps per token: {', '.join(f'{name} {num_steps[name] / num_tokens[name]:.3f}' for name in kinds)}")
    print(
        f"{times.num_hidden} masks hidden ({times.hidden * 1e3:.1f} ms), {times.num_exposed} not; between steps "
        f"{times.exposed * 1e3:.1f} ms: {times.hidden_share:.1%} of the time hidden"
    )


if __name__ == "__main__":
    main()
