"""Every file of corpus/ is refused by the decoder for the reason that it is there for, and the corpus is complete."""

import tracemalloc
from collections import Counter

import pytest

from pscore.wire.codecs.names import READABLE_INDEX_CODECS, READABLE_VALUE_CODECS
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile import make_corpus
from tests.hostile.corpus_files import FOLDERS, corpus
from tests.hostile.oracle import decode_within_memory

FILES = corpus()


@pytest.mark.parametrize("hostile", FILES, ids=str)
def test_a_hostile_chunk_is_refused_for_what_is_wrong_and_takes_no_memory(hostile):
    decode_within_memory(hostile.chunk)  # what is imported or compiled at the first use is not counted
    tracemalloc.start()
    try:
        refusal = decode_within_memory(hostile.chunk)
    finally:
        tracemalloc.stop()
    assert refusal is not None, "taken"
    assert refusal.reason is hostile.reason
    assert hostile.says in refusal.detail


def test_every_codec_has_a_folder_of_hostile_chunks_of_its_own():
    files = Counter(hostile.name.partition("/")[0] for hostile in FILES)
    assert set(files) == set(FOLDERS)
    assert min(files.values()) >= 10
    names = {pb.IndexCodec.Name(codec) for codec in READABLE_INDEX_CODECS}
    names |= {pb.ValueCodec.Name(codec) for codec in READABLE_VALUE_CODECS}
    assert {name.partition("CODEC_")[2].lower() for name in names} == set(FOLDERS)
    for hostile in FILES:
        codec = hostile.name.partition("/")[0]
        used = pb.IndexCodec.Name(hostile.chunk.index_codec), pb.ValueCodec.Name(hostile.chunk.value_codec)
        assert any(name.endswith(f"CODEC_{codec.upper()}") for name in used), hostile.name


def test_the_corpus_is_what_its_maker_makes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_corpus", "--check"])
    assert make_corpus.main() == 0, capsys.readouterr().err
