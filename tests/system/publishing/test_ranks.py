"""Ranks that have blocks of a model publish it together: real processes over gloo, and real servers."""

import pytest

from psclient import LocalServer
from tests.system.publishing.rank_scenarios import launch
from tests.tiers import long_but

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("shards", long_but([3], [1, 3]))
def test_the_blocks_of_all_ranks_are_one_version_bit_by_bit(tmp_path, shards):
    """Of all placements: rows, columns, strided ones, replicas, a tensor of one rank, and none at all."""
    with LocalServer(shards=shards) as server:
        found = launch("publishes", 4, tmp_path, server.server)
    assert [version for version, _, _ in found[0]] == [0, 1, 2, 3]
    told = [[each[:2] for each in ranks] for ranks in found]
    assert told == 4 * told[:1]
    assert all(is_same for _, _, is_same in found[0])
    size = found[0][0][1]
    assert all(0 < changed < size / 3 for _, changed, _ in found[0][1:])


@pytest.mark.long
def test_the_guides_loop_publishes_from_ranks(tmp_path):
    with LocalServer() as server:
        assert launch("run_the_guides_loop", 4, tmp_path, server.server) == [True] * 4


@pytest.mark.long
def test_new_publishers_on_other_blocks_go_on_with_differences(tmp_path):
    with LocalServer(shards=2) as server:
        resharded, damaged, lost = launch("go_on", 4, tmp_path, server.server)[0]
    assert resharded == damaged == (1, True), (
        "one word was changed, and others than the first rank's baseline are hints"
    )
    assert lost[0] > 100, "the first rank's baseline was damaged: all words are published"
    assert lost[1]


@pytest.mark.long
def test_what_cannot_be_published_is_refused_on_every_rank_and_does_no_harm(tmp_path):
    with LocalServer() as server:
        found = launch("refuse", 4, tmp_path, server.server)
    for version, outcomes, is_same in found:
        assert is_same
        kinds, texts = zip(*outcomes, strict=True)
        assert kinds == (*("ConfigurationError",) * 4, "published")
        expected = ["Partial", "redistribute"], ["[4]", "[3]"], ["another feed"], ["iterator"]
        for text, words in zip(texts, expected, strict=False):
            assert all(word in text for word in words), text
        assert texts[4] == str(version + 1)


def test_when_a_rank_dies_the_others_are_told(tmp_path):
    with LocalServer() as server:
        *others, killed = launch("lose_a_rank", 4, tmp_path, server.server)
    assert killed is None
    for found in others:
        assert [kind for kind, _ in found] == ["RankLostError"] * 2
        assert "new publisher" in found[0][1]


def test_every_rank_hears_that_no_server_answers(tmp_path):
    found = launch("find_no_server", 4, tmp_path, "127.0.0.1:1")
    assert {kind for kind, _ in found} == {"ServerUnreachableError"}
    assert len({text for _, text in found}) == 1
