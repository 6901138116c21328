"""How servers may be named, and that nothing else is taken for a name."""

import pytest

from pscore.net.addresses import AddressError, expand, is_service, split


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("a:1", ("a:1",)),
        (" a:1, b:2 ,[::1]:3,", ("a:1", "b:2", "[::1]:3")),
        ("ps-{0..2}.ps:50051", ("ps-0.ps:50051", "ps-1.ps:50051", "ps-2.ps:50051")),
        ("ps-{0..0}.ps:1", ("ps-0.ps:1",)),
        ("ps-{9..11}:1", ("ps-9:1", "ps-10:1", "ps-11:1")),
        ("10.0.0.{7..8}:1,c:1", ("10.0.0.7:1", "10.0.0.8:1", "c:1")),
        ("127.0.0.1:{50051..50052}", ("127.0.0.1:50051", "127.0.0.1:50052")),
        ("dns:///ps.ns.svc.cluster.local.:50051", ("dns:///ps.ns.svc.cluster.local.:50051",)),
        ("dns:///ps-{0..1}.ps:1", ("ps-0.ps:1", "ps-1.ps:1")),
        ("dns:///a:1,b:1", ("a:1", "b:1")),
        ("dns:///10.0.0.1:1", ("10.0.0.1:1",)),
        ("dns:///[::1]:1", ("[::1]:1",)),
    ],
)
def test_the_forms_of_docs_addresses(server, expected):
    assert expand(server) == expected


def test_one_name_stands_for_all_shards():
    assert is_service(*expand("dns:///psservice:50051"))
    assert not is_service(*expand("psservice:50051"))
    assert split("dns:///psservice:50051") == ("psservice", 50051)
    assert split("[2001:DB8::1]:7") == ("2001:db8::1", 7)


@pytest.mark.parametrize(
    ("server", "advice"),
    [
        ("", "HOST:PORT"),
        (",", "HOST:PORT"),
        ("host", "50051"),
        ("host:", "50051"),
        ("host:port", "50051"),
        ("host:0", "1 to 65535"),
        ("host:65536", "1 to 65535"),
        ("host:٣", "1 to 65535"),
        ("host:+1", "1 to 65535"),
        ("a:1,b", "HOST:PORT"),
        ("a:1,a:1", "names a:1 twice"),
        ("a:1,dns:///a:1", "names a:1 twice"),
        ("a-{0..2}:1,a-1:1", "names a-1:1 twice"),
        ("::1:50051", r"brackets: \[::1\]:50051"),
        ("[::1:50051", "brackets"),
        ("[host]:1", "no IPv6"),
        ("[fe80::1%eth0]:1", "no IPv6|HOST:PORT"),
        ("http://host:1", "HOST:PORT"),
        ("dns://8.8.8.8/host:1", "HOST:PORT"),
        ("unix:///tmp/socket:1", "HOST:PORT"),
        ("ho st:1", "HOST:PORT"),
        ("-host:1", "HOST:PORT"),
        ("host..a:1", "HOST:PORT"),
        ("h" * 300 + ":1", "HOST:PORT"),
        ("ps-{0..N-1}:1", "last number"),
        ("ps-{}:1", "last number"),
        ("ps-{3}:1", "last number"),
        ("ps-{a..c}:1", "last number"),
        ("ps-{-1..3}:1", "last number"),
        ("ps-{00..03}:1", "last number"),
        ("ps-{0..3..2}:1", "last number"),
        ("ps-{0..٣}:1", "last number"),
        ("ps-{0,1}:1", "in braces"),
        ("ps-{3..0}:1", "upwards"),
        ("ps-{0..999999999}:1", "at most 1024"),
        ("ps-{0..99999999999999999999}:1", "last number"),
        ("{0..3}-{0..3}:1", "one range"),
        ("{{0..3}}:1", "one range"),
        ("ps-{0..3:1", "one range"),
        ("ps-0..3}:1", "one range"),
        ("ps-}0..3{:1", "one range"),
        ("a-{0..600}:1,b-{0..600}:1", "at most 1024"),
    ],
)
def test_anything_else_is_refused_with_the_next_step(server, advice):
    with pytest.raises(AddressError, match=advice) as caught:
        expand(server)
    assert len(str(caught.value)) < 500
