"""Tests a model with a NaN in one embedding: its requests end, and all others have the tokens of single runs."""

import shutil

import numpy as np
import openvino as ov
import pytest
from support.helpers import SHORT, tokens_of

from staticllm import NumericalError, StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

GREEDY = {"max_new_tokens": 8, "ignore_eos": True}
POISON = 777


@pytest.fixture(scope="module")
def poisoned(zoo, tmp_path_factory):
    """Return the zoo's llama with a NaN in the embedding of one token."""
    folder = shutil.copytree(zoo / "llama", tmp_path_factory.mktemp("nan") / "llama")
    model = ov.Core().read_model(zoo / "llama" / "openvino_model.xml")
    vocab_size = model.output("logits").get_partial_shape()[2].get_length()
    tables = [
        node
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and list(node.shape)[:1] == [vocab_size] and len(node.shape) == 2
        and any("embed" in target.get_node().get_friendly_name() for out in node.outputs() for target in out.get_target_inputs())
    ]  # fmt: skip
    (table,) = tables
    data = np.array(table.data)
    data[POISON, 0] = np.nan
    changed = ov.opset13.constant(data)
    for target in table.output(0).get_target_inputs():
        target.replace_source_output(changed.output(0))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


@pytest.mark.parametrize(
    "scheduler", ["dynamic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fcfs", "chunked"))]
)
def test_the_other_requests_run_again_without_the_poisoned_one(poisoned, zoo, prompt_of, scheduler, original):
    prompts = [prompt_of(8 + 3 * i, seed=i) for i in range(10)]
    prompts = [[token if token != POISON else 5 for token in prompt] for prompt in prompts]
    reference = original(zoo / "llama")
    with StaticLLMPipeline(poisoned, "CPU", SCHEDULER=scheduler, MAX_NUM_SEQS=4, **SHORT) as pipe:
        handles = pipe.engine.run_between_steps(
            lambda: [
                pipe.submit(np.array(p), **GREEDY) for p in (*prompts[:4], [9, POISON, 11], *prompts[4:], [POISON])
            ]
        )
        innocent = [handle for index, handle in enumerate(handles) if index not in (4, 11)]
        assert [list(handle.result().tokens[0]) for handle in innocent] == [reference.greedy(p, 8) for p in prompts]
        for guilty in (handles[4], handles[11]):
            with pytest.raises(NumericalError, match="not finite"):
                guilty.result()
        assert tokens_of(pipe, prompts[0], 8) == reference.greedy(prompts[0], 8)
