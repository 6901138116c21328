"""Top-k replies: the judge must find an image that is not the replica, from the replies and the pushes alone."""

from dataclasses import replace

import numpy as np
import pytest

from verify.client.wire import Reply, digest
from verify.model.images import Images
from verify.validate.verdict import Verdict

LENGTH, LIFE = 40, "life"
NO_OFFSETS, NO_VALUES = np.empty(0, np.uint32), np.empty(0, np.float32)


def models_of(versions: int) -> list[np.ndarray]:
    noise = np.random.default_rng(1)
    models = [noise.normal(size=LENGTH).astype(np.float32)]
    for _ in range(versions):
        models.append(models[-1].copy())
        models[-1][noise.choice(LENGTH, 9, replace=False)] -= noise.normal(size=9).astype(np.float32)
    return models


def exact(number: int, version: int, model: np.ndarray, *, image: bool = True) -> Reply:
    return Reply(LIFE, 0, number, version, False, image, True, True, digest(model), NO_OFFSETS, NO_VALUES)


def topk(number: int, version: int, replica: np.ndarray, theta: np.ndarray, most: int) -> tuple[Reply, np.ndarray]:
    """Select as a server does whose image is ``replica``; return the reply and the replica with it."""
    difference = theta - replica
    offsets = np.sort(np.argsort(-np.abs(difference), kind="stable")[:most]).astype(np.uint32)
    after = replica.copy()
    after[offsets] += difference[offsets]
    values = difference[offsets]
    return Reply(LIFE, 0, number, version, True, True, False, True, digest(after), offsets, values), after


def verdict_of(replies: list[Reply], models: list[np.ndarray]) -> Verdict:
    verdict = Verdict()
    images = Images(verdict, replies)
    for version, model in enumerate(models):
        images.follow(version, model)
    images.finish()
    return verdict


@pytest.fixture
def story():
    """Six versions; an exact reply, top-k replies of versions 2 to 5, and at last one that owes nothing."""
    models = models_of(6)
    replies, replica = [exact(1, 1, models[1])], models[1]
    for number, version in enumerate((2, 3, 5), start=2):
        reply, replica = topk(number, version, replica, models[version], 5)
        replies.append(reply)
    for number in (5, 6):  # an fp32 sum may miss the difference by a rounding: then the next reply has the rest
        reply, replica = topk(number, 6, replica, models[6], LENGTH)
        replies.append(reply)
    assert np.array_equal(replica, models[6])
    replies.append(Reply(LIFE, 0, 7, 6, True, True, False, True, digest(replica), NO_OFFSETS, NO_VALUES))
    return replies, models


def test_replies_that_are_the_difference_are_acquitted(story):
    replies, models = story
    verdict = verdict_of(replies, models)
    assert (verdict.different, verdict.topk_replies) == (0, 6), verdict.notes


def test_an_entry_that_differs_in_a_bit_is_found(story):
    replies, models = story
    wrong = replies[2].values.copy()
    wrong.view(np.uint32)[3] ^= 1
    replies[2] = replace(replies[2], values=wrong)
    assert verdict_of(replies, models).different


def test_an_image_that_has_missed_a_reply_is_found(story):
    replies, models = story
    del replies[1]  # the worker has not applied what the server has added to its image
    assert verdict_of(replies, models).different


def test_a_replica_of_the_worker_that_is_another_is_found(story):
    replies, models = story
    replies[1] = replace(replies[1], digest=digest(models[0]))
    verdict = verdict_of(replies, models)
    assert verdict.different == 1
    assert "another replica" in verdict.notes[0]


def test_a_reply_that_owes_nothing_means_that_the_replica_is_the_model(story):
    replies, models = story
    too_early = replace(replies[-1], number=4, version=5, digest=replies[3].digest)
    assert verdict_of([*replies[:4], too_early], models[:6]).different


def test_a_reply_selected_while_pushes_came_is_of_the_versions_after_its_own(story):
    replies, models = story
    late, _ = topk(2, 1, models[1], models[3], 5)
    assert not verdict_of([replies[0], late], models).different


def test_a_reply_of_before_its_version_is_found(story):
    replies, models = story
    early, _ = topk(2, 3, models[1], models[2], 5)
    assert verdict_of([replies[0], early], models).different


def test_a_reply_thrown_away_is_repeated_byte_for_byte(story):
    replies, models = story
    lost = replace(replies[2], applied=False)
    assert not verdict_of([*replies[:2], lost, *replies[2:]], models).different
    other, _ = topk(3, 3, models[1], models[3], 4)
    verdict = verdict_of([*replies[:2], replace(other, applied=False), *replies[2:]], models)
    assert any("repeats" in note for note in verdict.notes)


def test_a_top_k_reply_to_a_life_without_a_replica_is_found(story):
    replies, models = story
    assert verdict_of(replies[1:2], models).different
