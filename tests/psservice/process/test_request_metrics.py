"""Metrics of requests: what Prometheus reads is what the library's own metrics would tell."""

import threading

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from psservice.observability.metrics import Metrics, RequestHistogram

BOUNDS = (0, 0.5, 1, 2, 1000)


def samples(registry):
    return [(each.name, each.labels, each.value) for metric in registry.collect() for each in metric.samples]


@given(st.lists(st.floats(-1, 2000) | st.sampled_from(BOUNDS), max_size=30))
def test_a_histogram_is_read_as_the_library_s(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = RequestHistogram("some_seconds", "Some.", BOUNDS, ours)
    oracle = Histogram("some_seconds", "Some.", buckets=BOUNDS, registry=theirs)
    for value in values:
        mine.observe(value)
        oracle.observe(value)
    assert samples(ours) == samples(theirs)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)), max_size=30))
def test_a_histogram_with_a_label_has_a_series_for_each_value_that_was_used(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = RequestHistogram("some_seconds", "Some.", BOUNDS, ours, "rpc")
    oracle = Histogram("some_seconds", "Some.", ["rpc"], buckets=BOUNDS, registry=theirs)
    for rpc, value in observed:
        mine.of(rpc).observe(value)
        oracle.labels(rpc=rpc).observe(value)
    assert samples(ours) == samples(theirs)


def test_no_count_of_a_thread_is_lost():
    metrics = Metrics()

    def count():
        for _ in range(2000):
            metrics.count("PullDiff", 1, sent_bytes=3)
            metrics.observe_pull("topk", 0.1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    read = metrics.registry.get_sample_value
    assert read("psservice_sent_bytes_total", {"rpc": "PullDiff"}) == 3 * 8000
    assert read("psservice_pulls_total", {"mode": "topk"}) == 8000
    assert read("psservice_reply_density_count") == 8000
    assert metrics.traffic["PullDiff"].answered == 8000
