"""Sets up a fresh machine and lets the embedded model answer, running as programs of fixed shape.

python scripts/demo.py
"""

from __future__ import annotations

from _setup import ensure_environment, run

PROMPTS = ("Tell me a story about a fox.", "What is an NPU?")


def main() -> None:
    python = ensure_environment()
    for prompt in PROMPTS:
        print(f"\n> {prompt}", flush=True)
        run(python, "-m", "staticllm", "run", prompt, "--stats")


if __name__ == "__main__":
    main()
