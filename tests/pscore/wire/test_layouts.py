"""Packed layouts: many tensors in few bytes, in pieces that a reader can bound."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import FrozenTensor, ModelLayout, TensorSpec
from pscore.wire import layouts
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import MOST_PACKED_BYTES, MOST_TENSORS, PIECE_BYTES, pack_layout, unpack_layout, unpacked
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))
F32 = torch.float32


def experts(count):
    """The tensors of a mixture of experts."""
    return tuple(
        TensorSpec(
            f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{('up', 'gate', 'down')[i % 3]}_proj.weight", (2,), F32
        )
        for i in range(count)
    )


def inflated(packed):
    return [pb.ModelLayout.FromString(zlib.decompress(piece)) for piece in packed.pieces]


@pytest.mark.long
def test_a_hundred_thousand_tensors_take_three_bytes_each_and_come_back():
    layout = ModelLayout(experts(100_000))
    packed = pack_layout(layout)
    assert packed.ByteSize() < 300_000
    assert unpack_layout(packed) == layout
    assert unpacked(packed) == layouts.layout_to_message(layout)


texts = st.text(st.sampled_from("ab.é語"), min_size=1, max_size=30)


@st.composite
def made(draw):
    """Layouts of all kinds of tensors, with names of any length and aliases."""
    names = draw(st.lists(texts, min_size=1, max_size=12, unique=True))
    kinds = [draw(st.sampled_from(["parameter", "buffer", "frozen"])) for _ in names]
    specs = [
        TensorSpec(name, tuple(draw(st.lists(st.sampled_from([1, 127, 128, 1 << 10]), max_size=3))), F32, aliases)
        for name, aliases in ((name, tuple(draw(st.lists(texts, max_size=2)))) for name in names)
    ]
    of = {kind: tuple(spec for spec, mine in zip(specs, kinds, strict=True) if mine == kind) for kind in set(kinds)}
    frozen = tuple(FrozenTensor(spec, bytes(32)) for spec in of.get("frozen", ()))
    first = TensorSpec("the first one", (1,), F32)
    return ModelLayout((first, *of.get("parameter", ())), of.get("buffer", ()), frozen)


@given(made(), st.integers(250, 2000))
@many
def test_any_layout_comes_back_from_pieces_that_keep_their_bound(layout, most):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layouts, "PIECE_BYTES", most)
        packed = pack_layout(layout)
        assert all(piece.ByteSize() <= most for piece in inflated(packed))
        assert len(packed.pieces) <= 1 + layouts.layout_to_message(layout).ByteSize() * 4 // most
        back = unpack_layout(packed)
    assert back == layout
    assert back.fingerprint == layout.fingerprint == packed.fingerprint


def test_the_words_of_a_feed_are_told_in_whichever_piece():
    layout = ModelLayout(experts(30_000), word_bytes=4)
    packed = pack_layout(layout)
    assert len(packed.pieces) > 1
    packed.pieces[:] = packed.pieces[1:] + packed.pieces[:1]
    turned = pb.PackedLayout(pieces=packed.pieces)
    assert unpacked(turned).word_bytes == 4


def test_what_no_server_takes_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(layouts, "MOST_TENSORS", 3)
    with pytest.raises(Rejected, match="at most 3 tensors, not 4"):
        pack_layout(ModelLayout(experts(4)))
    tied = ModelLayout((TensorSpec("w", (1,), F32, ("a", "b", "c", "d")),))
    with pytest.raises(Rejected, match="at most 3 aliases"):
        pack_layout(tied)


def test_a_tensor_that_fits_into_no_piece_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(layouts, "PIECE_BYTES", 400)
    with pytest.raises(Rejected, match="'w' has too many aliases"):
        pack_layout(ModelLayout((TensorSpec("v", (1,), F32), TensorSpec("w", (1,), F32, ("x" * 500,)))))


def test_names_that_do_not_compress_are_refused_by_their_bytes(monkeypatch):
    monkeypatch.setattr(layouts, "MOST_PACKED_BYTES", 1000)
    digests = [
        torch.randint(256, (32,), generator=torch.Generator().manual_seed(i)).numpy().tobytes() for i in range(50)
    ]
    frozen = tuple(FrozenTensor(TensorSpec(f"f{i}", (1,), F32), digest) for i, digest in enumerate(digests))
    with pytest.raises(Rejected, match="at most 1000 bytes once they are compressed") as refused:
        pack_layout(ModelLayout((TensorSpec("w", (1,), F32),), (), frozen))
    assert refused.value.reason is ErrorCode.BAD_REQUEST


def test_a_message_has_room_for_the_largest_layout_beside_the_settings_of_a_run():
    assert MOST_PACKED_BYTES + layouts.MOST_PIECES * 5 < 4 << 20
    assert layouts.MOST_PIECES * PIECE_BYTES > 100 * MOST_TENSORS


def test_a_layout_is_made_once():
    calls = []
    once = layouts.OncePerLayout(lambda layout: calls.append(layout) or len(calls))
    one, other = ModelLayout(experts(1)), ModelLayout(experts(2))
    assert [once(one), once(one), once(other), once(other), once(one)] == [1, 1, 2, 2, 3]
