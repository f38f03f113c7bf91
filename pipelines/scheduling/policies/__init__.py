"""The shipped policies: each module of this folder is one, under its own name, and its ``POLICY`` makes it.

To add a policy, add a module: ``policy_names`` lists the folder.
"""

import pkgutil
from functools import cache

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError, shown


@cache
def policy_names() -> tuple[str, ...]:
    """Return the names of the shipped policies, the default first."""
    found = sorted(each.name for each in pkgutil.iter_modules(__path__))
    return tuple(sorted(found, key=lambda name: name != StaticLLMConfig.scheduler))


def check_policy(name: str) -> None:
    """Check the name of a policy.

    Raises:
        ConfigError: no shipped policy has it; the message lists them.
    """
    if name not in policy_names():
        raise ConfigError(f"SCHEDULER={shown(name)}: must be one of {', '.join(map(repr, policy_names()))}")
