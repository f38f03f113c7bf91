"""What a connection needs of an infer request, whether it runs on the model as it is or in our engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from staticllm.daemon.sharing.device_scheduler import DeviceCall

Array = NDArray[Any]


@dataclass(frozen=True)
class CallResult:
    """The outputs of a call, which are valid until the next call of its request, and what it took."""

    outputs: list[Array]
    times: DeviceCall


class InferRequest(Protocol):
    """An infer request of one client. One thread at a time may call; any may call ``set_priority`` and ``cancel``."""

    def call(self, inputs: Mapping[int, Array], priority: int, wants_last: bool) -> CallResult:
        """Run a call on ``inputs`` by index.

        Args:
            wants_last: Whether the client reads only the logits after the last token.

        Raises:
            RuntimeError: OpenVINO refused the inputs.
            PromptError: they do not fit the states of a language model.
            ClosedError: the model was closed, or the request was cancelled.
        """
        ...

    def set_priority(self, priority: int) -> None:
        """Change the priority, also of a call that runs."""
        ...

    def reset(self) -> None: ...

    def state_names(self) -> list[str]: ...

    def get_state(self, index: int) -> Array:
        """Return the value of a state.

        Raises:
            IndexError: there is no such state; the methods below raise it, too.
        """
        ...

    def set_state(self, index: int, values: Array) -> None:
        """Set the value of a state.

        Raises:
            PromptError: type or shape are not those of the state.
        """
        ...

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state.

        Raises:
            PromptError: as for ``set_state``.
        """
        ...

    def reset_state(self, index: int) -> None:
        """Set one state back."""
        ...

    def profile(self) -> list[dict[str, object]]:
        """Return the times of the nodes in the last call, if the model was compiled with ``PERF_COUNT``."""
        ...

    def cancel(self) -> None:
        """End a call before its next device call, if it has several."""
        ...

    def close(self) -> None:
        """Release the request. A second call does nothing."""
        ...
