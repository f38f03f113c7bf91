"""Tests which devices are used, which cores an instance gets, and binding to them."""

import os
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.errors import ConfigError, DeviceError
from staticllm.pipelines.embedding.windve import affinity
from staticllm.pipelines.embedding.windve.affinity import Topology, bind, instance_cores, parse_list, read_topology
from staticllm.pipelines.embedding.windve.detector import UsedDevice, detect, named, without_slow_cpu

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="core affinity needs Linux")


def names(found):
    return [used.name for used in found.devices]


def test_devices_are_used_in_the_order_of_preference():
    assert names(detect(["CPU", "GPU.1", "GPU.0", "NPU"])) == ["NPU", "GPU.0", "GPU.1", "CPU"]
    assert detect(["CPU", "NPU"]).is_heterogeneous


def test_without_heterogeneous_only_the_first_kind_is_used():
    found = detect(["CPU", "NPU", "GPU"], heterogeneous=False)
    assert names(found) == ["NPU"]
    assert found.left_out == tuple(
        f"{name}: several kinds of devices are used only if HETEROGENEOUS is on" for name in ("GPU", "CPU")
    )
    assert names(detect(["GPU.0", "GPU.1", "CPU"], heterogeneous=False)) == ["GPU.0", "GPU.1"]


def test_one_device_is_never_heterogeneous():
    assert not detect(["CPU"]).is_heterogeneous
    assert detect(["CPU"]) == detect(["CPU"], heterogeneous=False)
    with pytest.raises(DeviceError, match="OpenVINO found no device at all, but no NPU, GPU or CPU"):
        detect([])


def test_a_cpu_that_misses_the_limit_with_one_query_is_left_out():
    both, seconds = detect(["CPU", "NPU"]), {"CPU": 1.5, "NPU": 3.0}
    measured = []

    def one(used):
        measured.append(used.name)
        return seconds[used.name]

    found = without_slow_cpu(both, 1.0, one)
    assert names(found) == ["NPU"]
    assert measured == ["CPU"], "other devices are not asked"
    assert found.left_out == ("CPU: one query takes 1.5 s, the limit is 1 s",)
    assert without_slow_cpu(both, 1.5, one) == both
    alone = detect(["CPU"])
    assert without_slow_cpu(alone, 1.0, one) == alone, "the only device is used however slow it is"


def test_groups_of_cores_are_devices_of_their_own():
    found = named("CPU#0-1, cpu#2+4", ["CPU"])
    assert found.devices == (UsedDevice("CPU#0-1", "CPU", (0, 1)), UsedDevice("CPU#2+4", "CPU", (2, 4)))
    assert names(named("GPU,NPU", ["CPU", "GPU.0", "NPU"])) == ["GPU", "NPU"]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", ConfigError, "name one or more"),
        ("NPU", DeviceError, "device 'NPU' is not on this machine; there are: CPU, GPU.0"),
        ("CPU,CPU", ConfigError, "CPU is used twice"),
        ("CPU,CPU#0", ConfigError, "CPU is used twice"),
        ("CPU#0-3,CPU#3-4", ConfigError, "CPU#0-3 and CPU#3-4 share processor 3"),
        ("GPU.0#1", ConfigError, "a group of cores is CPU#FIRST-LAST"),
        ("CPU#", ConfigError, "a group of cores is"),
        ("CPU#3-1", ConfigError, "a group of cores is"),
        ("GPU,GPU.0", ConfigError, "GPU.0 is used twice, as GPU; one device has one instance"),
        ("gpu.0, CPU, GPU", ConfigError, "GPU is used twice, as GPU.0"),
        ("CPU#0,CPU.0", ConfigError, "CPU.0 is used twice, as CPU"),
        ("GPU.1", DeviceError, "device 'GPU.1' is not on this machine; there are: CPU, GPU.0"),
        ("AUTO:GPU,CPU", DeviceError, "AUTO distributes work itself: name devices, for example NPU,CPU"),
        ("CPU,hetero", DeviceError, "HETERO distributes work itself"),
        ("MULTI:CPU", DeviceError, "MULTI distributes work itself"),
    ],
)
def test_devices_that_cannot_be_used_together_are_refused(text, error, said):
    with pytest.raises(error) as raised:
        named(text, ["CPU", "GPU.0"])
    assert said in str(raised.value)


def test_a_single_device_may_have_a_number_and_several_are_told_apart():
    assert named("NPU.0,GPU.0", ["GPU", "NPU"]).devices == (UsedDevice("NPU.0", "NPU"), UsedDevice("GPU.0", "GPU"))
    assert names(named("GPU,GPU.1", ["GPU.1", "GPU.0"])) == ["GPU", "GPU.1"]
    for text, said in (("NPU,NPU.0", "NPU.0 is used twice, as NPU;"), ("NPU.0,NPU", "NPU is used twice, as NPU.0;")):
        with pytest.raises(ConfigError, match=said):
            named(text, ["NPU"])
    with pytest.raises(ConfigError, match=r"GPU\.0 is used twice, as GPU;"):
        named("GPU,GPU.1,GPU.0", ["GPU.0", "GPU.1"])


def machine(num_nodes, each, threads=1):
    """Return nodes of ``each`` cores; the second threads of all cores come after the first of all, as on x86."""
    count = num_nodes * each
    cores = [tuple(core + count * thread for thread in range(threads)) for core in range(count)]
    return Topology(tuple(tuple(cores[node * each : (node + 1) * each]) for node in range(num_nodes)))


def test_the_published_machine_keeps_its_first_node_for_the_service():
    assert instance_cores(machine(4, 32)) == [list(range(32, 128))]
    assert instance_cores(machine(4, 32), 2) == [list(range(96, 128)), list(range(64, 96))]


def test_an_instance_gets_whole_nodes_or_a_part_of_one():
    assert instance_cores(machine(2, 24)) == [list(range(24, 48))], "the rest of node 0 would cross nodes"
    assert instance_cores(machine(1, 8)) == [list(range(2, 8))]
    assert instance_cores(machine(1, 8), 2) == [[5, 6, 7], [2, 3, 4]]
    assert instance_cores(machine(1, 2)) == [[1]]
    assert instance_cores(machine(1, 1)) == [], "the only core is the service's"


def test_hyper_threads_of_the_service_stay_with_it():
    assert instance_cores(machine(1, 4, threads=2)) == [[1, 2, 3, 5, 6, 7]]


@settings(deadline=None)
@given(nodes=st.integers(1, 4), each=st.integers(1, 12), threads=st.integers(1, 2), instances=st.integers(1, 6))
def test_instances_share_no_core_and_leave_a_quarter_to_the_service(nodes, each, threads, instances):
    topology = machine(nodes, each, threads)
    try:
        found = instance_cores(topology, instances)
    except ConfigError as error:
        assert "use fewer instances" in str(error)
        assert instances > topology.num_cores - affinity.service_cores(topology)
        return
    used = [processor for cores in found for processor in cores]
    assert len(used) == len(set(used))
    if not found:
        assert topology.num_cores == 1
        return
    assert len(found) == instances
    assert all(found)
    kept = [core for node in topology.nodes for core in node if not set(core) & set(used)]
    assert len(kept) >= max(1, topology.num_cores / 4)
    assert all(set(core) <= set(used) or not set(core) & set(used) for node in topology.nodes for core in node)
    for cores in found:
        touched = [node for node in topology.nodes if {p for core in node for p in core} & set(cores)]
        assert len(touched) == 1 or all({p for core in node for p in core} <= set(cores) for node in touched)


def test_lists_of_processors():
    assert parse_list("0-3,8") == {0, 1, 2, 3, 8}
    assert [parse_list(text) for text in ("", "a", "3-1", "1,", "-1", "1234567")] == [None] * 6


@needs_linux
def test_the_topology_is_read_once_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7, 9})
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7,8"), (10, "")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert read_topology(tmp_path).nodes == (((0, 4), (1, 5)), ((2, 6), (3, 7)), ((9,),))
    assert read_topology(tmp_path / "none").num_cores == 9, "without information each processor is a core"
    assert read_topology().num_cores >= 1


@needs_linux
def test_a_thread_is_bound_to_its_cores_and_others_are_not():
    before = os.sched_getaffinity(0)
    seen = []

    def bound():
        bind([max(before)])
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [{max(before)}]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match="processor 9999 cannot be used here; there are"):
        bind([9999])
    with pytest.raises(ConfigError, match="processors 9998 to 9999 cannot be used here"):
        bind([max(before), 9998, 9999])
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match="binding to no processor"):
        bind([])


def test_other_systems_say_that_they_cannot_bind(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for call in (read_topology, lambda: bind([0])):
        with pytest.raises(DeviceError, match=r"is not supported on .*: staticllm does it on Linux only"):
            call()
