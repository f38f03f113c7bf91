"""The forms of prompts: which one an input has, and the token ids of those that are tokens already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import openvino as ov
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.devices import read_first_tensor
from staticllm.errors import PromptError, PromptTooLongError

read_first_tensor()

Form = Literal["text", "texts", "history", "tokens"]
TokenInputs: TypeAlias = NDArray[Any] | ov.Tensor | genai.TokenizedInputs
"""Token ids ``[n]`` or ``[batch, n]``, of an integer type."""
Messages: TypeAlias = genai.ChatHistory | Sequence[Mapping[str, object]]
Inputs: TypeAlias = str | Sequence[str] | Messages | TokenInputs


def form_of(inputs: object) -> Form:
    """Return which of GenAI's input forms ``inputs`` has.

    Raises:
        PromptError: it has none of them, or is an empty list.
    """
    if isinstance(inputs, str):
        return "text"
    if isinstance(inputs, genai.ChatHistory):
        return "history"
    if isinstance(inputs, (np.ndarray, ov.Tensor, genai.TokenizedInputs)):
        return "tokens"
    if isinstance(inputs, Sequence) and all(isinstance(item, str) for item in inputs):
        if not inputs:
            raise PromptError("the list of prompts is empty: give at least one str")
        return "texts"
    if isinstance(inputs, Sequence) and all(isinstance(item, Mapping) for item in inputs):
        return "history"
    raise PromptError(
        f"inputs are a {type(inputs).__name__}: must be a str, a list of str, token ids "
        "(numpy, openvino.Tensor or TokenizedInputs), a ChatHistory or a list of messages"
    )


def texts_of(inputs: Inputs, form: Form) -> Sequence[str]:
    """Return the prompts of an input in text.

    Args:
        form: ``text`` or ``texts``.
    """
    return [cast(str, inputs)] if form == "text" else cast(Sequence[str], inputs)


def token_ids(inputs: TokenInputs) -> list[list[int]]:
    """Return the ids of each prompt in a numpy array or ``openvino.Tensor`` (``[n]`` or ``[batch, n]``) or ``TokenizedInputs``.

    Padding in ``TokenizedInputs`` is removed.

    Raises:
        PromptError: the type or the shape is wrong.
    """
    if isinstance(inputs, genai.TokenizedInputs):
        return real_ids(inputs)
    array = np.asarray(inputs.data if isinstance(inputs, ov.Tensor) else inputs)
    if array.dtype.kind not in "iu":
        raise PromptError(f"token ids are {array.dtype}: must be whole numbers")
    ids: list[list[int]] = _as_rows(array).tolist()
    return ids


def check_ids(ids: list[int], vocab_size: int, limit: int, is_chat: bool = False) -> None:
    """Check the token ids of one prompt.

    Raises:
        PromptError: the prompt has no tokens, or an id outside the vocabulary.
        PromptTooLongError: it has more tokens than ``limit``.
    """
    if not ids:
        raise PromptError("the prompt has no tokens: give at least one")
    if len(ids) > limit:
        raise PromptTooLongError(len(ids), limit, is_chat)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")


def real_ids(tokenized: genai.TokenizedInputs) -> list[list[int]]:
    """Return the ids of each prompt without padding.

    Raises:
        PromptError: there is not one mask value per id.
    """
    ids = _as_rows(np.asarray(tokenized.input_ids.data))
    mask = _as_rows(np.asarray(tokenized.attention_mask.data))
    if ids.shape != mask.shape or ids.dtype.kind not in "iu":
        raise PromptError(
            f"TokenizedInputs with {ids.size} ids of {ids.dtype} and a mask of {mask.size}: "
            "must be whole numbers, with one mask value per id"
        )
    return [row[seen != 0].tolist() for row, seen in zip(ids, mask, strict=True)]


def _as_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[0]):
        raise PromptError(f"token ids have the shape {list(array.shape)}: must be [n] or [batch, n]")
    return np.atleast_2d(array)
