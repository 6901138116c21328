"""The reference must find what is wrong: a judge that never convicts proves nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Download, Push, Reply, digest, rounded_digest
from verify.model.reference import judge
from verify.traffic.book import Book, in_doubt, read

LENGTH = 50
NO_OFFSETS, NO_VALUES = np.empty(0, np.uint32), np.empty(0, np.float32)
INITIAL = np.linspace(-1, 1, LENGTH, dtype=np.float32)


def make_push(step: int, worker: str = "w", *, dense: bool = False, shard: int = 0) -> Push:
    noise = np.random.default_rng(step)
    offsets = None if dense else np.sort(noise.choice(LENGTH, 7, replace=False)).astype(np.uint32)
    values = noise.normal(size=LENGTH if dense else 7).astype(np.float32)
    return Push("run", worker, f"life of {worker}", shard, step, 1, step - 1, 0, LENGTH, offsets, values)


def apply(theta: np.ndarray, push: Push) -> np.ndarray:
    theta = theta.copy()
    theta[slice(None) if push.offsets is None else push.offsets] -= push.values
    return theta


@pytest.fixture
def story(tmp_path):
    """Four pushes, all answered, one of them twice, with the model after each."""
    pushes = [make_push(step, dense=step == 3) for step in range(1, 5)]
    models = [INITIAL]
    book = Book(tmp_path / "a.book")
    book.begun([])
    for version, push in enumerate(pushes, start=1):
        book.sent(push)
        book.answered(push, version, 0, repeated=False)
        models.append(apply(models[-1], push))
    book.answered(pushes[1], 2, 0, repeated=True)
    book.pulled(Reply("life of w", 0, 7, 3, False, False, False, True, digest(models[3]), NO_OFFSETS, NO_VALUES))
    return tmp_path / "a.book", pushes, models


def verdict_of(path, model, version=4, seen=None):
    last = Download(version, 1, 0, model, pb.PackedLayout())
    return judge(0, read(path), INITIAL, last, seen or {})


def test_what_is_right_is_acquitted(story):
    path, _, models = story
    verdict = verdict_of(path, models[4], seen={2: {digest(models[2])}})
    assert verdict.good
    assert (verdict.sent, verdict.acknowledged, verdict.applied, verdict.repeated) == (4, 4, 4, 1)
    assert verdict.compared == 3  # a replica, a download on the way, the last model


def test_a_bit_that_differs_is_found(story):
    path, _, models = story
    wrong = models[4].copy()
    wrong.view(np.uint32)[17] ^= 1
    verdict = verdict_of(path, wrong)
    assert (verdict.good, verdict.wrong_bits) == (False, 1)


def test_a_zero_of_the_other_sign_is_found(story):
    path, _, models = story
    assert not verdict_of(path, np.where(models[4] == 0, -models[4], models[4]), seen={0: {digest(-INITIAL)}}).good


def test_an_acknowledged_push_that_the_server_does_not_have_is_lost(story):
    path, _, models = story
    verdict = verdict_of(path, models[3], version=3)
    assert (verdict.good, verdict.lost, verdict.wrong_bits) == (False, 1, 0)


def test_a_push_that_was_applied_twice_is_found(story):
    path, pushes, models = story
    verdict = verdict_of(path, apply(models[4], pushes[3]), version=5)
    assert (verdict.good, verdict.duplicated) == (False, 1)
    assert verdict.wrong_bits


def test_a_repeat_that_gets_another_answer_is_found(story, tmp_path):
    path, pushes, models = story
    other = Book(tmp_path / "b.book")
    other.answered(pushes[1], 5, 3, repeated=True)
    last = Download(4, 1, 0, models[4], pb.PackedLayout())
    verdict = judge(0, [*read(path), *read(tmp_path / "b.book")], INITIAL, last, {})
    assert (verdict.good, verdict.duplicated) == (False, 1)


def test_a_replica_that_was_something_else_is_found(story):
    path, _, models = story
    verdict = verdict_of(path, models[4], seen={3: {digest(models[2])}})
    assert (verdict.good, verdict.different) == (False, 1)


def rounded(model):
    """Return a model as a reader in bfloat16 notes it down, whatever its low bits are."""
    narrow = torch.from_numpy(model).bfloat16()
    assert rounded_digest(narrow.float().numpy()) == rounded_digest(model)
    return rounded_digest(model)


def test_a_reader_in_bfloat16_has_the_rounded_model_or_is_found(story):
    path, _, models = story
    assert verdict_of(path, models[4], seen={3: {rounded(models[3])}}).good
    verdict = verdict_of(path, models[4], seen={3: {rounded(models[2])}})
    assert (verdict.good, verdict.different) == (False, 1)


def test_rounding_is_that_of_torch():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000  # as near to one as to the other
    for values in (bits.view(np.float32), halves.view(np.float32)):
        rounded(values[np.isfinite(values)])


def test_a_version_that_was_seen_and_is_gone_is_found(story):
    path, _, models = story
    assert not verdict_of(path, models[4], seen={9: {"whatever"}}).good


def test_a_push_without_an_answer_is_in_doubt(story, tmp_path):
    _, _, models = story
    book = Book(tmp_path / "c.book")
    for version, push in enumerate([make_push(step, dense=step == 3) for step in range(1, 5)], start=1):
        book.sent(push)
        if version < 4:
            book.answered(push, version, 0, repeated=False)
    (left,) = in_doubt(tmp_path / "c.book")
    assert left.step == 4
    assert left.messages() == make_push(4).messages()
    verdict = verdict_of(tmp_path / "c.book", models[3], version=3)
    assert (verdict.good, verdict.in_doubt) == (False, 1)


def test_a_torn_entry_was_never_acted_upon(story):
    path, _, _ = story
    whole = path.read_bytes()
    entries = len(list(read(path)))
    path.write_bytes(whole + b'{"kind": "answered", "incarn')
    assert len(list(read(path))) == entries
    path.write_bytes(whole + b'{"kind": "sent", "bytes": 80}\n' + bytes(79))
    assert len(list(read(path))) == entries


def test_versions_of_a_life_rise_with_its_steps(tmp_path):
    pushes = [make_push(1), make_push(2)]
    book = Book(tmp_path / "d.book")
    for push, version, staleness in zip(pushes, (2, 1), (0, -1), strict=True):
        book.sent(push)
        book.answered(push, version, staleness, repeated=False)
    model = apply(apply(INITIAL, pushes[1]), pushes[0])
    verdict = verdict_of(tmp_path / "d.book", model, version=2)
    assert verdict.bit_identical
    assert (verdict.good, verdict.disordered) == (False, 1)


@pytest.mark.parametrize(("told", "disordered"), [(1, 0), (2, 1), (0, 1)])
def test_staleness_is_what_others_pushed_since_the_base(tmp_path, told, disordered):
    mine = [replace(make_push(step), base=0) for step in (1, 2)]
    other = replace(make_push(3, "other"), base=1)
    book = Book(tmp_path / "e.book")
    model = INITIAL
    for push, version, staleness in ((mine[0], 1, 0), (other, 2, 0), (mine[1], 3, told)):
        book.sent(push)
        book.answered(push, version, staleness, repeated=False)
        model = apply(model, push)
    assert verdict_of(tmp_path / "e.book", model, version=3).disordered == disordered
