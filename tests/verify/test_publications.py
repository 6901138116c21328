"""The judge of a feed must find what is wrong: one that never convicts proves nothing."""

from dataclasses import replace

import numpy as np
import pytest

from verify.model import words
from verify.model.publications import Download, Follower, Look, Part, Restore, Story, judge
from verify.traffic.notes import Claim
from verify.traffic.publications import Publication, PublisherBook, Told, read_books

LAYOUT = "octets"
FIRST, SECOND = 7, 8  # generations
SPLIT = words.size_of(LAYOUT) // 2
KINDS = ("all", "some", "strange", "none", "few")


@pytest.fixture
def recipes():
    parents = ["", "m0", "m1", "m2", "m3"]
    return {f"m{i}": words.Recipe(parent, KINDS[i], i) for i, parent in enumerate(parents)}


@pytest.fixture
def models(recipes):
    return words.Models(LAYOUT, recipes)


@pytest.fixture
def story(recipes, models):
    """Four versions that were acknowledged, and one model that was begun; two followers and two looks."""
    told = {f"m{i}": [Told(10 * i + 5, FIRST, i)] for i in range(4)}
    published = {
        name: Publication(name, recipe, words.digest(models[name]), 10.0 * i, told.get(name, []))
        for i, (name, recipe) in enumerate(recipes.items())
    }
    claims = tuple(claim(models, i, 10 * i + 6) for i in range(4))
    followers = [
        Follower("module", (claims[:2], claims[2:])),
        Follower("directory", (claims[:3], claims[2:]), is_kept=True, allows_older=True),
    ]
    return Story(LAYOUT, published, followers, [look(models, 1, 17), look(models, 3, 60)], [], [])


def claim(models, number, at, generation=FIRST, version=None):
    version = number if version is None else version
    return Claim(at, ((generation, version),) * 2, words.digest(models[f"m{number}"]))


def look(models, number, at, generation=FIRST, version=None, *, other=None):
    version = number if version is None else version
    first, second = models[f"m{number}"], models[f"m{number if other is None else other}"]
    return Look(
        at,
        at + 0.1,
        (Part(generation, version, 0, first[:SPLIT]), Part(generation, version, SPLIT, second[SPLIT:])),
    )


def with_claims(story, *claims, **changes):
    """Give the first follower one more life of these claims, before its last one."""
    first = story.followers[0]
    lives = (*first.lives[:1], claims, *first.lives[1:])
    return replace(story, followers=[replace(first, lives=lives, **changes), *story.followers[1:]])


def mixed(models):
    return words.digest(np.concatenate([models["m1"][:SPLIT], models["m2"][SPLIT:]]))


def test_what_is_right_is_acquitted(story):
    verdict = judge(story)
    assert verdict.good, verdict.notes
    assert (verdict.begun, verdict.acknowledged, verdict.in_doubt) == (5, 4, 1)
    assert (verdict.versions, verdict.claims, verdict.looks) == (4, 9, 2)


def test_a_claim_of_a_mixture_is_nobodys(story, models):
    verdict = judge(with_claims(story, Claim(30.0, ((FIRST, 2),) * 2, mixed(models))))
    assert not verdict.good
    assert verdict.nobodys == 1


def test_one_changed_bit_is_nobodys(story, models):
    octets = models["m2"].copy()
    octets[-1] ^= 1
    verdict = judge(with_claims(story, Claim(30.0, ((FIRST, 2),) * 2, words.digest(octets))))
    assert (verdict.nobodys, verdict.renamed, verdict.good) == (1, 1, False)


def test_a_model_is_nobodys_before_it_is_begun(story, models):
    assert judge(with_claims(story, claim(models, 4, 39, version=9))).nobodys == 1
    assert judge(with_claims(story, claim(models, 4, 41, version=9))).nobodys == 0


def test_a_claim_of_two_versions_is_a_mixture(story, models):
    verdict = judge(with_claims(story, Claim(30.0, ((FIRST, 2), (FIRST, 1)), words.digest(models["m2"]))))
    assert (verdict.mixed, verdict.good) == (1, False)


def test_a_version_that_is_another_model_than_its_publisher_was_told_is_found(story, models):
    verdict = judge(with_claims(story, claim(models, 0, 30, version=2)))
    assert (verdict.renamed, verdict.nobodys, verdict.good) == (1, 0, False)


def test_a_look_at_a_mixture_is_found(story, models):
    verdict = judge(replace(story, looks=[look(models, 1, 30, version=1, other=2), *story.looks]))
    assert verdict.nobodys == 1


def test_a_look_at_shards_on_their_way_is_right(story, models):
    parts = look(models, 2, 30).parts[0], look(models, 1, 30).parts[1]
    assert judge(replace(story, looks=[Look(30.0, 30.1, parts), *story.looks])).good
    spoilt = parts[1]._replace(octets=parts[1].octets ^ 1)
    assert judge(replace(story, looks=[Look(30.0, 30.1, (parts[0], spoilt)), *story.looks])).nobodys == 1


def test_a_download_of_a_mixture_is_found(story, models):
    assert judge(replace(story, downloads=[Download(30.0, words.digest(models["m2"]))])).good
    assert judge(replace(story, downloads=[Download(19.0, words.digest(models["m2"]))])).nobodys == 1
    assert judge(replace(story, downloads=[Download(30.0, mixed(models))])).nobodys == 1


def test_a_lost_version_is_found(story, models):
    verdict = judge(replace(story, looks=[look(models, 1, 30), *story.looks]))  # version 2 was acknowledged at 25
    assert (verdict.lost, verdict.good) == (1, False)


def test_another_history_without_a_restore_is_a_loss(story, models):
    looks = [look(models, 1, 30, SECOND), *story.looks]
    assert judge(replace(story, looks=looks)).lost == 3
    asked = Restore(28.0, FIRST, True, 29.0, 1, SECOND)
    assert judge(replace(story, looks=looks, restores=[asked])).lost == 0
    assert judge(replace(story, looks=looks, restores=[replace(asked, asked=31.0, ended=32.0)])).lost == 3
    assert judge(replace(story, looks=looks, restores=[replace(asked, asked=1.0, ended=2.0)])).lost == 2


def test_a_restore_that_brings_another_model_is_found(story, models):
    looks = [look(models, 0, 30, SECOND, 1), *story.looks]
    asked = Restore(28.0, FIRST, True, 29.0, 1, SECOND)
    assert judge(replace(story, looks=looks, restores=[asked])).renamed == 1
    assert judge(replace(story, looks=looks, restores=[replace(asked, is_by_version=False)])).renamed == 0


def test_a_follower_that_goes_back_is_found(story, models):
    back = claim(models, 2, 30), claim(models, 1, 31)
    assert judge(with_claims(story, *back)).went_back == 1
    assert judge(with_claims(story, *back, allows_older=True)).went_back == 1
    other = claim(models, 2, 30), claim(models, 1, 31, SECOND)
    assert judge(with_claims(story, *other)).went_back == 1
    assert judge(with_claims(story, *other, allows_older=True)).went_back == 0


def test_another_life_of_a_directory_goes_on_from_the_one_before(story, models):
    lives = (claim(models, 2, 30),), (claim(models, 1, 31), claim(models, 3, 37))
    for is_kept in (False, True):
        follower = Follower("f", lives, is_kept=is_kept)
        assert judge(replace(story, followers=[follower])).went_back == int(is_kept)


def test_a_follower_that_does_not_arrive_is_late(story, models):
    first = story.followers[0]
    for lives in (first.lives[:1], (*first.lives, ())):
        verdict = judge(replace(story, followers=[replace(first, lives=lives)]))
        assert (verdict.late, verdict.good) == (1, False)


def test_shards_without_the_last_version_are_found(story, models):
    assert judge(replace(story, looks=[look(models, 1, 17), look(models, 2, 36)])).lost
    assert not judge(replace(story, looks=[])).good  # nothing was put to the test


def test_a_publisher_that_hands_over_another_model_is_found(story):
    wrong = replace(story.publications["m2"], recipe=words.Recipe("m1", "some", 99))
    assert not judge(replace(story, publications={**story.publications, "m2": wrong})).good


def test_a_book_is_read_up_to_its_last_whole_line(tmp_path, recipes):
    path = tmp_path / "publisher-a.book"
    book = PublisherBook(path)
    book.begin("m0", recipes["m0"], "d0")
    book.told("m0", FIRST, 3)
    book.trouble("ServerUnreachableError")
    book.begin("m1", recipes["m1"], "d1")
    path.write_bytes(path.read_bytes()[:-4])
    found, troubles = read_books([path])
    assert [*found] == ["m0"]
    assert found["m0"].recipe == recipes["m0"]
    assert [(each.generation, each.version) for each in found["m0"].told] == [(FIRST, 3)]
    assert troubles == ["ServerUnreachableError"]


@pytest.mark.parametrize("layout", words.LAYOUTS)
@pytest.mark.parametrize("kind", words.KINDS)
def test_kinds_of_changes_change_what_they_say(layout, kind):
    models = words.Models(layout, {"a": words.Recipe("", "all", 1), "b": words.Recipe("a", kind, 2)})
    before, after = models["a"], models["b"]
    share = np.mean(before != after)
    assert {"none": share == 0, "all": share == 1}.get(kind, 0 < share < 0.7)
    booleans = [part for tensor, part in words.parts(layout, after) if tensor.dtype == "bool"]
    assert all(part.max() <= 1 for part in booleans)
