import pytest

from staticllm.core import KVState, MaskKind, ModelShape, RecurrentState, Variant
from staticllm.ports import CallSizes, find_port, input_names, port_of

KV = KVState(3, "key", "v", heads=2, head_dim=8)
SCALE = KVState(3, "key", "v", heads=2, head_dim=2, is_scale=True)
STATE = RecurrentState(1, "s", (1, 4, 6))
VARIANT = Variant(16, 64, 4, extra_logits=1)
SHAPES = {
    "input_ids": (1, 16), "position_ids": (1, 16), "mask.causal": (1, 1, 16, 80), "mask.window:7": (1, 1, 16, 80),
    "key_positions": (1, 1, 1, 80), "query_positions": (1, 1, 16, 1), "logit_rows": (5,), "logits": (1, 5, 99),
    "past.3.key": (1, 2, 64, 8), "past.3.value.scale": (1, 2, 64, 2), "present.3.key": (1, 2, 16, 8),
    "state.1": (1, 4, 6), "state.1.next": (1, 4, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_at_a_variant(name):
    shape, port = SHAPES[name], find_port(name)
    ranges = port.ranges(len(shape), CallSizes.of(VARIANT))
    own = [None if axis in ranges else size for axis, size in enumerate(shape)]
    assert port.shape_at(own, VARIANT) == shape and port.fits(shape, VARIANT)
    assert port.shape_at(shape, Variant(1, 8)) == shape, "static sizes stay"
    assert not ranges or not port.fits(shape, Variant(7, 9))


def test_positions_may_have_several_copies():
    assert find_port("position_ids").shape_at([3, 1, None], VARIANT) == (3, 1, 16)


def test_bounds_hold_all_variants():
    sizes = CallSizes.of(Variant(1, 256), Variant(64, 0), Variant(8, 1024, 8))
    assert find_port("mask.causal").ranges(4, sizes) == {2: (1, 64), 3: (1, 1088)}
    assert find_port("past.0.key").ranges(4, sizes) == {2: (0, 1024)} and find_port("state.0").ranges(3, sizes) == {}


def test_plugins_may_add_names_and_nothing_else_is_a_port():
    assert port_of({"Result_12", "logits"}) == ("logits", find_port("logits"))
    for name in ("attention_mask", "past.x.key", "past.0.query", "mask.", "logits2", "state.1.nexts"):
        assert find_port(name) is None
    with pytest.raises(KeyError, match="attention_mask"):
        port_of(["attention_mask"])


def test_the_inputs_of_a_model_are_those_of_its_shape():
    shape = ModelShape((KV, SCALE), (MaskKind(),), 99, 2, recurrent_states=(STATE,))
    assert input_names(shape) == {
        "input_ids", "logit_rows", "position_ids", "mask.causal", "past.3.key", "past.3.key.scale", "state.1",
    }  # fmt: skip
    assert input_names(ModelShape((), (), 99, 0, has_distances=True)) == {
        "input_ids", "logit_rows", "key_positions", "query_positions",
    }  # fmt: skip
    assert all(find_port(name) for name in input_names(shape))
