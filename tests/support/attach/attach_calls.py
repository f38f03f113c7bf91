"""A program that uses OpenVINO's Python API in about 100 ways and prints what it sees as JSON; run natively and attached."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import openvino as ov
from attach_models import counting_model, dynamic_model, half_model, slow_model, static_model
from openvino import opset13 as ops

SEEN = {}


def plain(value):
    if isinstance(value, ov.Tensor):
        return ["tensor", value.element_type.get_type_name(), list(value.shape), value.data.tobytes().hex()]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if hasattr(value, "items"):
        names = [sorted(key.names) if hasattr(key, "names") else str(key) for key in value]
        return list(zip(names, map(plain, value.values()), strict=True))
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def see(name, call):
    """Note the result of a call, or the type of its exception."""
    try:
        SEEN[name] = plain(call())
    except Exception as error:
        SEEN[name] = f"raises {type(error).__name__}"


X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
Y = np.arange(6, dtype=np.int64).reshape(2, 3)
ONE = np.ones((1, 4), np.float32)


def ports(core):
    model = core.compile_model(dynamic_model(), "CPU")
    see("isinstance", lambda: isinstance(model, ov.CompiledModel))
    for kind in ("inputs", "outputs"):
        for index, port in enumerate(getattr(model, kind)):
            see(f"{kind} {index}", lambda port=port: [
                port.get_any_name(), sorted(port.names), str(port.partial_shape), str(port.element_type), port.index,
                port.node.friendly_name,
            ])  # fmt: skip
    see("input by name", lambda: str(model.input("y").partial_shape))
    see("output by name", lambda: str(model.output("sum").element_type))
    see("input unknown", lambda: model.input("nothing"))
    see("output out of range", lambda: model.output(7))
    see("input of several", lambda: str(model.input()))
    for name in (
        "PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT", "EXECUTION_DEVICES", "OPTIMAL_NUMBER_OF_INFER_REQUESTS", "NETWORK_NAME",
        "SUPPORTED_PROPERTIES", "LOG_LEVEL", "MODEL_DISTRIBUTION_POLICY", "ENABLE_CPU_PINNING", "NOPE",
    ):  # fmt: skip
        if name != "NETWORK_NAME":
            see(f"property {name}", lambda name=name: model.get_property(name))
            see(f"type of {name}", lambda name=name: type(model.get_property(name)).__name__)
    see("set_property", lambda: model.set_property({"PERFORMANCE_HINT": "LATENCY"}))
    see("set_property pair", lambda: model.set_property(("PERFORMANCE_HINT", "LATENCY")))
    for given in (("A", "B"), (), (3,), (None,), ({},), ([],), (("A",),), ({3: 4},), ({"A": 1}, 1)):
        see(f"set_property {given}", lambda given=given: model.set_property(*given))
    see("set_property keyword", lambda: model.set_property(PERFORMANCE_HINT="LATENCY"))
    see("get_property of a number", lambda: model.get_property(3))
    see("runtime model", lambda: len(model.get_runtime_model().inputs))
    see("export", lambda: len(model.export_model()) > 100)
    see("import", lambda: core.import_model(model.export_model(), "CPU")({"x": X, "y": Y})[0])
    see("repr", lambda: repr(model).startswith("<CompiledModel"))
    see("states of none", model.query_state)
    see("reset of none", model.reset_state)


def shapes(core):
    """Ports whose sizes have bounds, and an output of unknown size behind an input of a fixed one."""
    for shape in ([(1, 4), 3], [(2, -1), 3], [-1, (0, 7)], [4, 3]):
        sizes = [ov.Dimension(*size) if isinstance(size, tuple) else size for size in shape]
        x = ops.parameter(ov.PartialShape(sizes), np.float32, name="x")
        model = core.compile_model(ov.Model([ops.concat([x, x], 1), ops.non_zero(x)], [x], "shapes"), "CPU")
        see(
            f"shapes {shape}", lambda model=model: [str(port.partial_shape) for port in (*model.inputs, *model.outputs)]
        )
        request = model.create_infer_request()
        see(f"idle {shape}", lambda request=request: list(request.get_output_tensor(1).shape))
        rows = np.eye(4, 3, dtype=np.float32)
        see(f"values {shape}", lambda request=request, rows=rows: request.infer({0: rows}).to_tuple())


def calls(core):
    model = core.compile_model(dynamic_model(), "CPU", {"INFERENCE_PRECISION_HINT": ov.Type.f32})
    both = {"x": X, "y": Y}
    see("call by name", lambda: model(both))
    see("call by index", lambda: model({0: X, 1: Y}))
    see("call by port", lambda: model({model.input("x"): X, model.input("y"): Y}))
    see("call with a list", lambda: model([X, Y]))
    see("call with a tuple", lambda: model((X, Y)))
    see("call with tensors", lambda: model({"x": ov.Tensor(X.copy()), "y": ov.Tensor(Y.copy())}))
    see("call with lists", lambda: model({"x": X.tolist(), "y": Y.tolist()}))
    see("call with float64", lambda: model({"x": X.astype(np.float64), "y": Y.astype(np.int8)}))
    see("call with Fortran order", lambda: model({"x": np.asfortranarray(X), "y": Y[::-1]}))
    see("call without rows", lambda: model({"x": X[:0], "y": Y[:0]}))
    see("share_inputs", lambda: model(both, share_inputs=False))
    see("share_outputs", lambda: model(both, share_outputs=True))
    see("dict of results", lambda: model(both).to_dict())
    see("tuple of results", lambda: model(both).to_tuple())
    see("names of results", lambda: [sorted(names) for names in model(both).names()])
    see("result by name", lambda: model(both)["sum"])
    see("result by port", lambda: model(both)[model.output(1)])
    see("result unknown", lambda: model(both)["nothing"])
    see("result out of range", lambda: model(both)[9])
    see("infer_new_request", lambda: model.infer_new_request(both))
    see("unknown name", lambda: model({"z": X}))
    see("index out of range", lambda: model({5: X}))
    see("negative index", lambda: model({-1: X}))
    see("wrong key", lambda: model({1.5: X}))
    see("wrong width", lambda: model({"x": np.ones((2, 5), np.float32), "y": Y}))
    see("wrong rank", lambda: model({"x": np.ones(3, np.float32), "y": Y}))
    see("shapes that do not fit together", lambda: model({"x": X, "y": np.ones((5, 3), np.int64)}))
    see("an object", lambda: model(object()))
    see("an object inside", lambda: model({"x": object(), "y": Y}))
    see("after errors", lambda: model(both))
    large = np.random.default_rng(1).normal(size=(40000, 3)).astype(np.float32)
    see("large", lambda: float(model({"x": large, "y": np.zeros((40000, 3), np.int64)})["sum"].sum()))
    see("small after large", lambda: model(both))


def requests(core):
    model = core.compile_model(static_model(), "CPU")
    request = model.create_infer_request()
    see("request repr", lambda: repr(request))
    see("request isinstance", lambda: isinstance(request, ov.InferRequest))
    see("idle wait", request.wait)
    see("idle wait_for", lambda: request.wait_for(1))
    see("idle latency", lambda: request.latency)
    see("idle input shape", lambda: list(request.get_input_tensor().shape))
    see("idle output shape", lambda: list(request.get_output_tensor(0).shape))
    see("infer", lambda: request.infer({"x": ONE}))
    see("infer of a tensor", lambda: request.infer(ov.Tensor(ONE.copy())))
    see("infer of an array", lambda: request.infer(ONE))
    see("infer of a list", lambda: request.infer([1.0, 2.0, 3.0, 4.0]))
    see("infer again", request.infer)
    see("latency", lambda: request.latency > 0)
    see("get_tensor", lambda: request.get_tensor("twice"))
    see("get_tensor keyword", lambda: request.get_tensor(name="x"))
    see("get_tensor by port", lambda: request.get_tensor(model.output(0)))
    see("get_tensor unknown", lambda: request.get_tensor("nothing"))
    see("get_output_tensor", request.get_output_tensor)
    see("get_output_tensor keyword", lambda: request.get_output_tensor(index=0))
    see("get_output_tensor 3", lambda: request.get_output_tensor(3))
    see("input_tensors", lambda: request.input_tensors)
    see("output_tensors", lambda: request.output_tensors)
    see("results", lambda: request.results)
    see("model ports", lambda: [str(request.model_inputs), str(request.model_outputs)])
    see("compiled model", lambda: request.get_compiled_model()({"x": ONE * 5}))

    def in_place():
        request.get_input_tensor().data[:] = 7
        return request.infer()

    def old_handle():
        tensor = request.get_output_tensor()
        request.infer({"x": ONE * 11})
        return tensor.data.copy()

    def own_output():
        target = np.zeros((1, 4), np.float32)
        request.set_output_tensor(0, ov.Tensor(target, shared_memory=True))
        request.infer({"x": ONE * 3})
        return target

    def set_and_infer():
        request.set_input_tensor(ov.Tensor(ONE * 9))
        request.infer()
        return request.get_output_tensor().data.copy()

    def by_names():
        request.set_tensors({"x": ov.Tensor(ONE * 4), "twice": ov.Tensor(np.zeros((1, 4), np.float32))})
        return request.infer()

    see("input in place", in_place)
    see("old handle", old_handle)
    see("set_input_tensor", set_and_infer)
    see("set_tensor", lambda: (request.set_tensor("x", ov.Tensor(ONE * 8)), request.infer())[1])
    see("set_input_tensors", lambda: (request.set_input_tensors({0: ov.Tensor(ONE * 6)}), request.infer())[1])
    see("own output", own_output)
    see("set_tensors", by_names)
    see("set_tensor unknown", lambda: request.set_tensor("nothing", ov.Tensor(ONE)))
    see("set wrong type", lambda: request.set_input_tensor(ov.Tensor(np.ones((1, 4), np.int8))))
    see("set wrong shape", lambda: request.set_output_tensor(0, ov.Tensor(np.ones((1, 3), np.float32))))
    see("cancel when idle", request.cancel)
    see("after cancel", lambda: request.infer({"x": ONE}))
    see("released", model.release_memory)
    see("after release", lambda: model({"x": ONE}))


def asynchronous(core):
    model = core.compile_model(slow_model(), "CPU")
    request, big = model.create_infer_request(), np.ones((900, 1500), np.float32)
    busy = {
        "get_tensor": lambda: request.get_tensor("y"), "get_output_tensor": lambda: request.get_output_tensor(0),
        "get_input_tensor": lambda: request.get_input_tensor(0), "start_async": lambda: request.start_async({"x": big}),
        "infer": lambda: request.infer({"x": big}), "input_tensors": lambda: request.input_tensors,
        "results": lambda: request.results, "query_state": request.query_state,
        "reset_state": request.reset_state, "profiling_info": lambda: request.profiling_info,
        "set_input_tensor": lambda: request.set_input_tensor(0, ov.Tensor(big)), "wait_for": lambda: request.wait_for(0),
        "set_callback": lambda: request.set_callback(lambda _: None, 1), "model_inputs": lambda: len(request.model_inputs),
    }  # fmt: skip
    for name, call in busy.items():
        request.start_async({"x": big}, share_inputs=True)
        see(f"busy {name}", call)
        request.wait()
    see("values of the last", lambda: float(request.get_tensor("y").data.mean()) > 0.99)
    small = big[:2]
    request.start_async({"x": small})
    end = time.monotonic() + 20
    while not request.wait_for(10) and time.monotonic() < end:
        pass
    see("after wait_for", lambda: list(request.get_output_tensor().shape))
    request.start_async({"x": small[:1]})
    time.sleep(0.3)
    see("without wait", lambda: list(request.get_output_tensor().shape))
    seen = []
    request.set_callback(lambda data: seen.append([data, list(request.get_output_tensor().shape)]), 7)
    for data in (None, 3, None):
        request.start_async({"x": small}, data)
        request.wait()
    request.infer({"x": small})
    see("callbacks", lambda: seen)
    see("userdata", lambda: request.userdata)
    for wrong in (None, 3):
        see(f"callback {wrong}", lambda wrong=wrong: request.set_callback(wrong, None))
    for timeout in (-1, 1.5, "1", None, True, np.int64(3), 1 << 40):
        see(f"wait_for {timeout!r}", lambda timeout=timeout: request.wait_for(timeout))
    see("callback without userdata", lambda: request.set_callback(lambda _: None))
    threads = []
    request.set_callback(lambda _: threads.append(threading.current_thread() is threading.main_thread()), None)
    request.start_async({"x": small})
    request.wait()
    see("thread of the callback", lambda: threads)

    def fail(_):
        raise KeyError("boo")

    request.set_callback(fail, None)
    request.start_async({"x": small})
    see("wait after a failing callback", request.wait)
    see("wait again", request.wait)
    see("infer after it", lambda: list(request.infer({"x": small})[0].shape))


def queues(core):
    model = core.compile_model(static_model(), "CPU")
    queue = ov.AsyncInferQueue(model, 3)
    see("queue isinstance", lambda: isinstance(queue, ov.AsyncInferQueue))
    see("queue len", lambda: len(queue))
    see("queue userdata", lambda: queue.userdata)
    see("queue ready", queue.is_ready)
    found = {}
    queue.set_callback(lambda request, data: found.update({data: request.get_output_tensor().data[0, 0].item()}))
    for number in range(12):
        queue.start_async({"x": ONE * number}, number)
    queue.wait_all()
    see("queue results", lambda: sorted(found.items()))
    see("queue userdata after", lambda: len(queue.userdata))
    see("queue item", lambda: isinstance(queue[0], ov.InferRequest))
    see("queue iteration", lambda: [isinstance(request, ov.InferRequest) for request in queue])
    see("queue item tensor", lambda: list(queue[1].get_output_tensor().shape))
    see("queue idle id", lambda: queue.get_idle_request_id() in (0, 1, 2))
    see("queue bad input", lambda: queue.start_async({"nothing": ONE}))
    see("queue without jobs", lambda: len(ov.AsyncInferQueue(model)) >= 1)
    for jobs in (2.0, "2", None, True, np.int64(2)):
        see(f"queue of {jobs!r}", lambda jobs=jobs: len(ov.AsyncInferQueue(model, jobs)))
    for place in (-1, 1.0, "a", slice(0, 1), np.int64(1)):
        see(f"queue item {place!r}", lambda place=place: isinstance(queue[place], ov.InferRequest))
    see("queue callback None", lambda: ov.AsyncInferQueue(model, 1).set_callback(None))
    see("queue of -1", lambda: ov.AsyncInferQueue(model, -1))
    other = ov.AsyncInferQueue(model, 2)
    other.set_callback(lambda request, data: 1 / data)
    see("queue failing callback", lambda: (other.start_async({"x": ONE}, 0), other.wait_all()))
    see("queue without callback", lambda: (queue.start_async({"x": ONE}), queue.wait_all())[1])


def states(core):
    model = core.compile_model(counting_model(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request, one = model.create_infer_request(), np.ones((1, 2), np.float32)
    see("counting", lambda: [request.infer({"x": one})[0] for _ in range(3)])
    see("state names", lambda: [state.name for state in request.query_state()])
    see("state value", lambda: request.query_state()[0].state)
    see("state reset", lambda: (request.query_state()[0].reset(), request.infer({"x": one})[0])[1])
    tensor = ov.Tensor(np.full((1, 2), 40, np.float32))
    see("state set", lambda: (setattr(request.query_state()[0], "state", tensor), request.infer({"x": one})[0])[1])
    see("state written in place", lambda: (write_state(request, 100), request.infer({"x": one})[0])[1])
    see(
        "state written and set",
        lambda: (
            write_state(request, 7),
            setattr(request.query_state()[0], "state", tensor),
            request.infer({"x": one})[0],
        )[2],
    )
    see("state written and read", lambda: (write_state(request, 8), request.query_state()[0].state)[1])
    see(
        "state written and reset",
        lambda: (write_state(request, 9), request.reset_state(), request.infer({"x": one})[0])[2],
    )
    see("state name set", lambda: setattr(request.query_state()[0], "name", "other"))
    see("state set to an array", lambda: setattr(request.query_state()[0], "state", one))
    see("reset_state", lambda: (request.reset_state(), request.infer({"x": one})[0])[1])
    see("states apart", lambda: model.create_infer_request().infer({"x": one})[0])
    see(
        "state of the model",
        lambda: (model({"x": one})[0], model({"x": one})[0], model.reset_state(), model({"x": one})[0]),
    )
    see("states of the model", lambda: len(model.query_state()))


def write_state(request, value):
    """Write into the tensor of a state, which natively is the state itself."""
    request.query_state()[0].state.data[:] = value


def sources(core, folder):
    path = folder / "model.xml"
    ov.save_model(static_model(), path, compress_to_fp16=False)
    for name, given in (("text", str(path)), ("Path", path)):
        see(f"compile {name}", lambda given=given: core.compile_model(given, "CPU")({"x": ONE}))
        see(f"read {name}", lambda given=given: core.compile_model(core.read_model(given), "CPU")({"x": ONE}))
    changed = core.read_model(path)
    changed.reshape([2, 4])
    see("reshaped", lambda: core.compile_model(changed, "CPU")({"x": np.ones((2, 4), np.float32)}))
    see("compile_model", lambda: ov.compile_model(str(path), "CPU")({"x": ONE}))
    see("without device", lambda: core.compile_model(str(path))({"x": ONE}))
    see("AUTO", lambda: core.compile_model(str(path), "AUTO")({"x": ONE}))
    see("missing file", lambda: core.compile_model("nowhere.xml", "CPU"))
    see("wrong device", lambda: core.compile_model(str(path), "NOPE"))
    see("wrong property", lambda: core.compile_model(str(path), "CPU", {"NOPE": 1}))
    see("wrong model", lambda: core.compile_model(3, "CPU"))
    preprocess = ov.preprocess.PrePostProcessor(core.read_model(path))
    preprocess.input().tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NC"))
    built = core.compile_model(preprocess.build(), "CPU")
    see("preprocessed", lambda: [str(built.input().element_type), built({"x": ONE.astype(np.uint8)})])
    see("bf16 port", lambda: core.compile_model(half_model(), "CPU").input().element_type)
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": 1})
    see("property of the core", lambda: core.compile_model(str(path), "CPU").get_property("INFERENCE_NUM_THREADS"))


def main():
    core = ov.Core()
    for part in (ports, shapes, calls, requests, asynchronous, queues, states):
        part(core)
    sources(core, Path(sys.argv[1]))
    print(json.dumps({"seen": SEEN, "class": type(core.compile_model(static_model(), "CPU")).__name__}))


if __name__ == "__main__":
    main()
