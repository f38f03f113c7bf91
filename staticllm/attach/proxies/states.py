"""The states of a request, with the attributes of `openvino.VariableState`."""

from __future__ import annotations

from typing import Any

from openvino._pyopenvino import Tensor

from ..far_request import FarRequest


class FarState:
    """One state of a request of the daemon."""

    def __init__(self, far: FarRequest, index: int, name: str) -> None:
        self._far, self._index, self._name = far, index, name

    @property
    def name(self) -> str:
        """The name of the state."""
        return self._name

    @property
    def state(self) -> Tensor:
        """The value of the state now; what is written into it before the next call changes the state as natively."""
        values = self._far.get_state(self._index)
        return Tensor(values, shared_memory=True) if values.size else Tensor(values)

    @state.setter
    def state(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"a state must be an openvino.Tensor, not {type(value).__name__}")
        self._far.set_state(self._index, value.data)

    def reset(self) -> None:
        """Set the state back."""
        self._far.reset_state(self._index)

    def __repr__(self) -> str:
        return f"<VariableState: {self.name}>"


def states_of(far: FarRequest) -> list[FarState]:
    """Return the states of a request."""
    names = far.state_names() if far.model.is_stateful else []
    return [FarState(far, index, name) for index, name in enumerate(names)]
