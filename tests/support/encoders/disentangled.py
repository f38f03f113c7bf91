"""Encoders with the disentangled attention of DeBERTa: scores of words and relative places, gathered over a table."""

import numpy as np
from openvino import opset13 as ops
from support.encoders.encoder_models import HEADS, WIDTH, TinyEncoder, a_range, number

SPAN = 16


def integers(value):
    return ops.convert(value, "i64")


def as_vector(scalar):
    return ops.unsqueeze(scalar, ops.constant(0))


class Disentangled(TinyEncoder):
    """``grows``: whether the part of the table in use grows with the rows up to ``SPAN``, as in the first version.

    The second version always uses the whole table. ``is_shifted``: whether that part begins at the first row of the table,
    so that a distance has another row in longer texts: a mistake, which only makes sense for one length.
    """

    def __init__(self, grows, terms=("c2p", "p2c"), scale=None, is_shifted=False, **options):
        super().__init__(**options)
        self.grows, self.terms, self.scale, self.is_shifted = grows, terms, scale, is_shifted

    def _attention(self, query, key, value, padding, rows):
        span = ops.minimum(rows, ops.constant(np.int64(SPAN))) if self.grows else ops.constant(np.int64(SPAN))
        table = self._weight(2 * SPAN, WIDTH)
        if self.grows:
            middle = span if self.is_shifted else ops.constant(np.int64(SPAN))
            bounds = [as_vector(ops.add(middle, x)) for x in (ops.negative(span), span)]
            table = ops.slice(table, *bounds, np.array([1]), np.array([0]))
        places = integers(a_range(rows))
        distance = ops.subtract(ops.unsqueeze(places, ops.constant(1)), ops.unsqueeze(places, ops.constant(0)))
        scores = ops.matmul(query, key, False, True)
        size = ops.concat([ops.shape_of(scores)], 0)
        if "c2p" in self.terms:
            along = ops.matmul(query, self._of_places(table), False, True)
            scores = ops.add(scores, self._gathered(along, distance, span, size))
        if "p2c" in self.terms:
            along = ops.matmul(key, self._of_places(table), False, True)
            back = self._gathered(along, ops.negative(distance), span, size)
            scores = ops.add(scores, ops.transpose(back, np.array([0, 1, 3, 2])))
        scores = ops.divide(scores, number((3 * WIDTH // HEADS) ** 0.5))
        if self.scale is not None:
            scores = self.scale(scores, rows)
        return ops.matmul(ops.softmax(ops.add(scores, padding), axis=-1), value, False, False)

    def _of_places(self, table):
        """Return the table as keys: ``[1, heads, 2 * span, head_dim]``."""
        return self._heads(ops.unsqueeze(table, ops.constant(0)))

    def _gathered(self, along, distance, span, size):
        """Return the scores of ``along [B, heads, S, 2 * span]`` at the distance of each pair."""
        last = ops.subtract(ops.multiply(span, ops.constant(np.int64(2))), ops.constant(np.int64(1)))
        places = ops.minimum(ops.maximum(ops.add(distance, span), ops.constant(np.int64(0))), last)
        return ops.gather_elements(along, ops.broadcast(places, size), 3)
