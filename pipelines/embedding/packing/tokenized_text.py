"""The tokens of one text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenizedText:
    """The token ids of one text, and the type of each token for models that know several; None: all 0."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64] | None = None
    num_prompt: int = 0
    """The tokens at its start that are seen by the others but do not count in its vector."""

    def __len__(self) -> int:
        return len(self.ids)
