"""Runs the Python tests and samples of a checkout of openvino.genai with our classes in place of GenAI's.

python scripts/genai_suite.py CHECKOUT                       # test files and the samples, with both classes
python scripts/genai_suite.py CHECKOUT test_sampling.py samples --model my_model --only ours
python scripts/genai_suite.py CHECKOUT test_rag.py --encoder my_encoder --seconds 300   # embeddings and rerankers
python scripts/genai_suite.py CHECKOUT test_whisper_pipeline.py test_whisper_pipeline_static.py --speech my_whisper

Nothing is copied from the checkout, and nothing is downloaded. Tests that would take a model from a hub get --model instead,
and their reference is GenAI's own stateful pipeline. Our class runs tests for the NPU on the CPU. Samples run in f32, and the
texts of both classes are compared. For test_rag.py, the models are --encoder and the tiny ones of tests/_encoders, and the
reference is the original in f32, one text per call. For the tests of Whisper, --speech has the folders ``stateful`` and
``three_files`` of scripts/real_whisper.py, and the reference is GenAI's class on the CPU in f32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
PLUGIN = "genai_suite_plugin"
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
TESTS = (
    "test_llm_pipeline_static.py", "test_llm_pipeline.py", "test_sampling.py", "test_structured_output.py",
    "test_parsers.py", "test_stateful_speculative_decoding.py",
)  # fmt: skip
NEEDS = {"test_llm_pipeline.py": "pydantic", "test_structured_output.py": "pydantic"}
QUESTION = "What is an NPU?"
SAMPLES: dict[str, list[str]] = {
    "greedy_causal_lm.py": ["MODEL", QUESTION],
    "multinomial_causal_lm.py": ["MODEL", QUESTION],
    "chat_sample.py": ["MODEL"],
    "encrypted_model_causal_lm.py": ["MODEL", QUESTION],
    "benchmark_genai.py": ["-m", "MODEL", "-p", QUESTION, "-n", "2"],
    "lora_greedy_causal_lm.py": ["MODEL", "ADAPTER", QUESTION],
    "beam_search_causal_lm.py": ["MODEL", QUESTION, "Hello!"],
    "prompt_lookup_decoding_lm.py": ["MODEL", QUESTION],
    "speculative_decoding_lm.py": ["MODEL", "MODEL", QUESTION],
    "structured_output_generation.py": ["MODEL"],
    "compound_grammar_generation.py": ["MODEL"],
    "structural_tags_generation.py": ["MODEL"],
}
"""The samples that need no network, except one that needs a data set."""
OTHER_TEXTS = ("multinomial_causal_lm.py", "benchmark_genai.py", "structural_tags_generation.py")
"""Samples whose output is another one at each run."""
METRICS = "MAIN MODEL"
"""The line after which a sample prints times."""
SAMPLE_NEEDS = {name: "pydantic" for name in SAMPLES if name.startswith(("structur", "compound"))}
PASSED = ("passed", "xpassed", "xskipped")
"""Expected failures do not count as failures, whether they happen or not."""
Outcomes = dict[str, dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of openvino.genai")
    parser.add_argument("what", nargs="*", default=[*TESTS, "samples"], help="test files, or samples")
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--adapter", type=Path, help="safetensors file of a LoRA adapter for the model, for its sample")
    parser.add_argument("--encoder", type=Path, help="directory of an embedding model (default: a tiny one)")
    parser.add_argument("--speech", type=Path, help="folder of a model of Whisper's kind: stateful, three_files")
    parser.add_argument(
        "--speech-languages", type=Path, help="the same of a multilingual model, for tests of languages"
    )
    parser.add_argument(
        "--recordings", type=Path, default=RECORDINGS, help="folder of WAV files (16 bits, 16 kHz, mono)"
    )
    parser.add_argument("--only", choices=("ours", "genai"), help="one class instead of both")
    parser.add_argument("--seconds", type=int, default=60, help="a test or sample that runs longer has failed")
    parser.add_argument("-k", default="", help="as for pytest")
    options = parser.parse_args()
    options.checkout, options.model = options.checkout.resolve(), (options.model or demo_model()).resolve()
    if not (options.checkout / "tests" / "python_tests").is_dir():
        sys.exit(f"{options.checkout} has no tests/python_tests: give a checkout of openvino.genai")
    if options.speech is not None and not any(options.recordings.glob("*.wav")):
        sys.exit(
            f"{options.recordings} has no *.wav: give --recordings (Debian's pocketsphinx-testdata has such files)"
        )
    sides = [options.only] if options.only else ["genai", "ours"]
    found: dict[str, dict[str, Outcomes]] = {}
    for what in options.what:
        needed = NEEDS.get(what)
        if needed and importlib.util.find_spec(needed) is None:
            print(f"{what} is skipped: {needed} is not installed", flush=True)
            continue
        run = run_samples if what == "samples" else run_tests
        found[what] = {side: run(options, what, side) for side in sides}
    report(found, sides)


def demo_model() -> Path:
    from staticllm import demo_model_path

    return demo_model_path()


def environment(options: argparse.Namespace, side: str, log: str = "", is_exact: bool = False) -> dict[str, str]:
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    folders = {
        "ENCODER": options.encoder,
        "SPEECH": options.speech,
        "LANGUAGES": options.speech_languages,
        "RECORDINGS": options.recordings,
    }
    own = {"GENAI_SUITE_CLASS": side, "GENAI_SUITE_MODEL": str(options.model), "GENAI_SUITE_LOG": log}
    for name, path in folders.items():
        own[f"GENAI_SUITE_{name}"] = "" if path is None else str(path.resolve())
    own["GENAI_SUITE_EXACT"] = "1" if is_exact else ""
    return {**os.environ, **own, "GENAI_SUITE_SECONDS": str(options.seconds), "PYTHONPATH": os.pathsep.join(paths)}


def run_tests(options: argparse.Namespace, file: str, side: str) -> Outcomes:
    """Return the outcomes by test. A test that kills its process counts as died, and the others still run."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        log.touch()
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", file]
        command += ["-k", options.k] if options.k else []
        before = -1
        while True:
            ended = subprocess.run(
                command,
                cwd=options.checkout / "tests" / "python_tests",
                env=environment(options, side, str(log)),
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            outcomes = read_log(log)
            if ended.returncode in (0, 1, 5) or len(outcomes) == before:
                break
            before = len(outcomes)
        if not outcomes:
            print(f"{file} with {side}: pytest ran no test:\n{ended.stdout[-2000:]}{ended.stderr[-500:]}", flush=True)
    return outcomes


def read_log(log: Path) -> Outcomes:
    """Return the last outcome of each test; a failure in its set-up or tear-down counts."""
    outcomes: Outcomes = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if outcomes.get(entry["test"], {}).get("outcome") != "failed":
            outcomes[entry["test"]] = entry
    return outcomes


def run_samples(options: argparse.Namespace, what: str, side: str) -> Outcomes:
    """Return the outcomes by sample, which run in f32. A sample passes if it ends by itself without an error."""
    outcomes: Outcomes = {}
    folder = options.checkout / "samples" / "python" / "text_generation"
    for name, arguments in SAMPLES.items():
        needed = SAMPLE_NEEDS.get(name)
        if needed and importlib.util.find_spec(needed) is None:
            print(f"{name} is skipped: {needed} is not installed", flush=True)
            continue
        if "ADAPTER" in arguments and options.adapter is None:
            print(f"{name} is skipped: give --adapter", flush=True)
            continue
        files = {"MODEL": str(options.model), "ADAPTER": str(options.adapter)}
        given = [files.get(argument, argument) for argument in arguments]
        command = [sys.executable, "-W", "ignore", str(SCRIPTS / f"{PLUGIN}.py"), str(folder / name), *given]
        outcomes[name] = run_sample(command, environment(options, side, is_exact=True), options.seconds)
    return outcomes


def run_sample(command: list[str], env: dict[str, str], seconds: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            ended = subprocess.run(
                command,
                cwd=scratch,
                env=env,
                input=f"{QUESTION}\nHello!\n",
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "died", "reason": f"ran for more than {seconds} s"}
    lines = ended.stderr.strip().splitlines()
    if ended.returncode:
        return {"outcome": "failed", "reason": lines[-1] if lines else f"exit code {ended.returncode}"}
    return {"outcome": "passed", "reason": "", "text": ended.stdout}


def report(found: dict[str, dict[str, Outcomes]], sides: list[str]) -> None:
    """Print a table in Markdown, and the reasons of failures in tests that GenAI's own class passes."""
    print("| file | " + " | ".join(f"{side}: passed | failed | skipped" for side in sides) + " |")
    print("|---|" + "---|" * (3 * len(sides)))
    for what, outcomes in found.items():
        cells = [f"{counts(outcomes[side])}" for side in sides]
        print(f"| {what} | " + " | ".join(cells) + " |")
    for what, outcomes in found.items():
        theirs = outcomes.get("genai", {})
        missed: Counter[str] = Counter()
        for name, entry in outcomes.get("ours", {}).items():
            if is_failed(entry) and not is_failed(theirs.get(name, {"outcome": "passed"})):
                missed[f"{name.split('::')[-1].split('[')[0]}: {entry.get('reason') or entry['outcome']}"[:200]] += 1
        for reason, times in missed.most_common():
            print(f"{what}: {times} x {reason}")
    if len(sides) > 1 and "samples" in found:
        compare_texts(found["samples"]["genai"], found["samples"]["ours"])


def compare_texts(theirs: Outcomes, ours: Outcomes) -> None:
    """Print how many samples printed the same text with both classes."""
    names = [name for name in ours if "text" in ours[name] and "text" in theirs[name] and name not in OTHER_TEXTS]
    texts = {name: [comparable(side[name]["text"]) for side in (theirs, ours)] for name in names}
    other = [name for name in names if len(set(texts[name])) > 1]
    print(f"samples: the same text in f32 in {len(names) - len(other)} of {len(names)}")
    for name in other:
        print(
            f"samples: {name}: GenAI {theirs[name]['text'].strip()[-200:]!r}, ours {ours[name]['text'].strip()[-200:]!r}"
        )


def comparable(text: str) -> str:
    """Return the text of a sample without its times, and with scores to three digits: f32 sums differ by their order."""
    return re.sub(r"-?\d+\.\d{6}\b", lambda found: f"{float(found[0]):.3f}", text.partition(METRICS)[0].strip())


def is_failed(entry: dict[str, str]) -> bool:
    return entry["outcome"] not in (*PASSED, "skipped")


def counts(outcomes: Outcomes) -> str:
    skipped = sum(entry["outcome"] == "skipped" for entry in outcomes.values())
    failed = sum(map(is_failed, outcomes.values()))
    return f"{len(outcomes) - skipped - failed} | {failed} | {skipped}"


if __name__ == "__main__":
    main()
