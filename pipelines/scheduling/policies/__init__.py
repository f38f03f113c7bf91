"""The shipped policies: each module of this folder is one, under its own name, and its ``POLICY`` makes it.

To add a policy, add a module: ``staticllm.config.schedulers`` lists the folder.
"""
