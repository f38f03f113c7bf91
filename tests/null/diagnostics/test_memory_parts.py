"""How the readings of a process become the bytes of parts, which add up to its private memory."""

from hypothesis import given
from hypothesis import strategies as st

from staticllm.pipelines.diagnostics.process_memory import UNEXPLAINED, MemoryStage, divide

SIZES = st.integers(0, 1 << 40)
STAGES = st.lists(
    st.builds(
        MemoryStage,
        st.just("stage"),
        st.sampled_from(["a", "b", None]),
        SIZES,
        st.fixed_dictionaries({"KV slots": SIZES, "buffers": SIZES}),
    ),
    min_size=1,
)


def test_growth_belongs_to_the_part_of_its_stage_and_counted_bytes_to_their_own():
    stages = [
        MemoryStage("start", "libraries", 50, {}),
        MemoryStage("compile", "program", 90, {"file": 30}),
        MemoryStage("warm-up", "program", 200, {"file": 0}),
        MemoryStage("ready", "program", 200, {"file": 0, "KV slots": 20}),
        MemoryStage("prompt", "activations", 300, {"file": 0, "KV slots": 80}),
        MemoryStage("at rest", None, 303, {"file": 1, "KV slots": 80}),
    ]
    assert divide(stages) == {
        "libraries": 50,
        "program": 130,  # 10 + 140, less the 20 that turned out to be slots
        "activations": 40,
        "file": 1,
        "KV slots": 80,
        UNEXPLAINED: 2,
    }


@given(STAGES)
def test_the_parts_add_up_to_the_last_reading(stages):
    parts = divide(stages)
    assert sum(parts.values()) == stages[-1].private
    assert parts["KV slots"] == stages[-1].counted["KV slots"]
    assert list(parts)[-1] == UNEXPLAINED
