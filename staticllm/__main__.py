"""``python -m staticllm``."""

from staticllm.cli import main

main()
