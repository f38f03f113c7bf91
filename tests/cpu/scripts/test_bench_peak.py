"""Tests the products of ``scripts/bench_products.py`` and the jobs of its workers on a tiny model."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _scripts(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))


def test_products_have_the_shapes_of_the_model(model_path):
    import bench_products
    from bench_products import Products, matrix_shapes

    shapes = matrix_shapes(str(model_path("demo")))
    assert len(shapes) % 6 == 0, "as many in each of the layers, and no head"
    assert bench_products.in_layers(shapes) == [shapes[:4]] * 6
    products = Products(str(model_path("demo")))
    assert products.work() == {"flops": 2.0 * sum(outputs * inputs for outputs, inputs in shapes)}
    found = products.products(16)
    assert {"f32", "int8 weights"} <= set(found)
    assert min(found.values()) > 0


def test_layers_end_where_shapes_repeat(monkeypatch):
    import bench_products

    shapes = [(4, 2), (2, 4), (8, 2)] * 3
    monkeypatch.setattr(bench_products, "CACHE_WEIGHTS", 33)
    assert bench_products.in_layers(shapes) == [shapes[:3], shapes[:3]]
    monkeypatch.setattr(bench_products, "CACHE_WEIGHTS", 10**9)
    assert bench_products.in_layers(shapes) == [shapes[:3]] * 3
    assert bench_products.in_layers([(1, 2), (3, 4)]) == [[(1, 2), (3, 4)]]


@pytest.mark.slow
def test_the_jobs_of_a_worker(model_path):
    from bench_figures import Figures
    from bench_peak import measure
    from bench_workers import Worker

    figures, path = Figures(), str(model_path("demo"))
    with Worker("ours", path) as ours, Worker("products", path) as products:
        assert ours.do("rest")["is_complete"]
        measure(figures, ours, products, 2, (16, 64))
    assert set(figures.values) == {"prefill_16", "prefill_64"}
    for found in figures.values.values():
        assert {"ours", "f32", "int8 weights"} <= set(found)
        assert all(len(values) == 2 and min(values) > 0 for values in found.values())


def test_every_target_names_a_measure_and_a_peer():
    import bench
    from bench_figures import BEST
    from bench_report import name_of
    from bench_targets import TARGETS

    assert set(TARGETS) == set(bench.SHAPES)
    for targets in TARGETS.values():
        for target in targets:
            assert name_of(target.mine.measure)
            for figure in (target.mine, target.other):
                assert figure is None or figure.peer in {*bench.PEERS, BEST, *bench.KV_LENS}


def test_weights_are_read_in_full(model_path):
    import bench

    path = str(model_path("demo"))
    assert bench.weights(path).nbytes == (model_path("demo") / "openvino_model.bin").stat().st_size // 8 * 8
    assert bench.read_weights(path) > 0
