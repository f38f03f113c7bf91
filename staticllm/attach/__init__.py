"""Attaches a program that uses OpenVINO to the daemon; only the standard library, NumPy and the program's OpenVINO.

``staticllm attach -- COMMAND`` does so for programs of others, which load this package under another name, from a Python
environment without staticllm. In a program of one's own, ``import staticllm.attach`` does the same. The imports are relative, and
they reach ``wire`` only.
"""

from .hook import install, set_priority, watch

__all__ = ["set_priority"]

if __name__.startswith("staticllm."):
    install()
    watch()
