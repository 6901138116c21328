"""What a group of tensors sends: one sparse segment or its dense runs, and what quantisation takes from it."""

import torch

from psclient.engine.segments import joined
from psclient.rpc.shard_stream import as_decoded
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb


def dense(start, end):
    return SparseSlice(Span(start, end), None, torch.arange(start, end).float())


def test_dense_neighbours_become_runs_and_a_gap_ends_one():
    runs = joined(Span(0, 20), [dense(0, 4), dense(4, 6), dense(9, 12)])
    assert [(run.span, run.offsets) for run in runs] == [(Span(0, 6), None), (Span(9, 12), None)]
    assert torch.cat([run.values for run in runs]).tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]


def test_one_sparse_tensor_makes_the_group_one_sparse_segment():
    sparse = SparseSlice(Span(10, 20), torch.tensor([1, 3]), torch.tensor([5.0, 6.0]))
    nothing = SparseSlice(Span(6, 10), torch.empty(0, dtype=torch.int64), torch.empty(0))
    [piece] = joined(Span(4, 20), [dense(4, 6), nothing, sparse])
    assert piece.span == Span(4, 20)
    assert piece.offsets.tolist() == [0, 1, 7, 9]
    assert piece.values.tolist() == [4, 5, 5, 6]


def test_a_long_dense_run_stays_dense_beside_the_rows_of_a_table():
    rows = SparseSlice(Span(10, 20), torch.tensor([1, 3]), torch.tensor([5.0, 6.0]))
    before, run = joined(Span(0, 90_004), [dense(20, 90_000), rows, dense(0, 4), dense(90_000, 90_004)])
    assert (before.span, before.offsets.tolist()) == (Span(0, 20), [0, 1, 2, 3, 11, 13])
    assert (run.span, run.offsets) == (Span(20, 90_004), None)


def test_a_group_that_sends_nothing_has_no_segment():
    assert joined(Span(0, 4), []) == []


def test_what_arrives_and_what_quantisation_takes_make_what_was_sent():
    part = SparseSlice(Span(0, 9), torch.tensor([0, 4, 8]), torch.tensor([1.0, 1.0 + 2**-20, -3.0]))
    encoded = list(frames.encode(part, frames.WireForm(value=pb.VALUE_CODEC_BF16), chunk_bytes=1 << 16))
    arriving, lost = as_decoded(part, encoded)
    assert arriving.values.tolist() == [1.0, 1.0, -3.0]
    assert (lost.offsets.tolist(), lost.values.tolist()) == ([4], [2**-20])
