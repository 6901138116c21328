"""The independent reference: the books of all workers, replayed in numpy, against what the server holds.

It takes nothing from the server but the versions that workers were answered and the model that anybody can download.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from verify.client.wire import Download, Floats, Push, Reply, digest, rounded_digest
from verify.model.images import Images
from verify.traffic.book import Entry
from verify.validate.verdict import Verdict

Name = tuple[str, int, int]


def judge(
    shard: int, entries: Iterable[Entry], initial: Floats, last: Download, seen: Mapping[int, set[str]]
) -> Verdict:
    """Replay a shard's acknowledged pushes and compare.

    Args:
        shard: its index.
        entries: of all books.
        initial: the shard's values at version 0.
        last: the model at the end.
        seen: digests of models that were downloaded on the way, or that readers have held, by version.
    """
    verdict = Verdict(applied=last.version)
    pushes: dict[Name, Push] = {}
    versions: dict[Name, int] = {}
    expected: dict[int, set[str]] = defaultdict(set)
    stale: dict[Name, int] = {}
    replies: list[Reply] = []
    for version, digests in seen.items():
        expected[version] |= digests
    for entry in entries:
        line = entry.line
        if line.get("shard") != shard:
            continue
        if entry.push is not None:
            pushes.setdefault(entry.name, entry.push)
        elif entry.reply is not None:
            replies.append(entry.reply)
            if not entry.reply.topk:
                expected[entry.reply.version].add(entry.reply.digest)
                verdict.whole_replies += entry.reply.whole
        elif line["kind"] == "refused":
            verdict.refused += 1
            verdict.say(f"push {entry.name} was refused: {line['why']}")
        elif line["kind"] == "answered":
            _take_answer(verdict, entry, versions)
            stale[entry.name] = line["staleness"]
    _check_staleness(verdict, pushes, versions, stale)
    verdict.sent, verdict.acknowledged = len(pushes), len(versions)
    verdict.in_doubt = len(pushes.keys() - versions.keys()) - verdict.refused
    order = _order(verdict, versions)
    _check_steps(verdict, versions)
    history = [(version, pushes[order[version]]) for version in sorted(order)]
    _replay(verdict, history, initial, last, expected, Images(verdict, replies))
    return verdict


def _take_answer(verdict: Verdict, entry: Entry, versions: dict[Name, int]) -> None:
    line, name = entry.line, entry.name
    verdict.repeated += line["repeated"]
    known = versions.setdefault(name, line["version"])
    if known != line["version"]:
        verdict.duplicated += 1
        verdict.say(f"push {name} was answered with version {known} and with version {line['version']}")


def _check_staleness(
    verdict: Verdict, pushes: Mapping[Name, Push], versions: Mapping[Name, int], stale: Mapping[Name, int]
) -> None:
    """Compare each staleness with the versions since the push's base that its own life has not made."""
    own: dict[str, list[int]] = defaultdict(list)
    for name in sorted(versions, key=lambda name: versions[name]):
        own[name[0]].append(versions[name])
    for name, version in versions.items():
        if name not in pushes:
            continue
        base = pushes[name].base
        between = max(0, bisect_left(own[name[0]], version) - bisect_right(own[name[0]], base))
        if stale[name] != version - 1 - base - between:
            verdict.disordered += 1
            verdict.say(f"push {name} of base {base} at version {version}: {stale[name]} stale")


def _order(verdict: Verdict, versions: Mapping[Name, int]) -> dict[int, Name]:
    """Put pushes in the order of their versions, and miss what is not there."""
    order: dict[int, Name] = {}
    for name, version in versions.items():
        if version > verdict.applied:
            verdict.lost += 1
            verdict.say(f"push {name} was acknowledged as version {version}, the server ends at {verdict.applied}")
        elif version in order:
            verdict.lost += 1
            verdict.say(f"pushes {name} and {order[version]} were both acknowledged as version {version}")
        else:
            order[version] = name
    nobodys = [version for version in range(1, verdict.applied + 1) if version not in order]
    verdict.duplicated += len(nobodys)
    if nobodys:
        verdict.say(f"versions that are nobody's: {nobodys[:10]}")
    return order


def _check_steps(verdict: Verdict, versions: Mapping[Name, int]) -> None:
    """Make sure that the versions of one life rise with its steps."""
    lives: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for (incarnation, _, step), version in versions.items():
        lives[incarnation].append((step, version))
    for incarnation, steps in lives.items():
        steps.sort()
        for (_, before), (step, version) in pairwise(steps):
            if version <= before:
                verdict.disordered += 1
                verdict.say(f"step {step} of {incarnation} is version {version}, the step before it {before}")


def _replay(
    verdict: Verdict,
    history: list[tuple[int, Push]],
    initial: Floats,
    last: Download,
    expected: Mapping[int, set[str]],
    images: Images,
) -> None:
    """Subtract push after push in fp32, and compare wherever somebody has seen the model."""
    theta = initial.astype(np.float32).copy()
    _compare(verdict, theta, 0, expected)
    images.follow(0, theta)
    for version, push in history:
        if push.offsets is None:
            theta -= push.values
        else:
            theta[push.offsets] -= push.values
        _compare(verdict, theta, version, expected)
        images.follow(version, theta)
    images.finish()
    wrong = np.flatnonzero(theta.view(np.uint32) != last.values.view(np.uint32))
    verdict.compared += 1
    verdict.different += bool(wrong.size)
    verdict.wrong_bits = int(wrong.size)
    if wrong.size:
        verdict.say(f"{wrong.size} elements of the last model differ, the first at {last.start + int(wrong[0])}")
    beyond = [version for version in expected if version > verdict.applied]
    if beyond:
        verdict.different += len(beyond)
        verdict.say(f"models were seen at versions that the server does not have: {sorted(beyond)[:10]}")


def _compare(verdict: Verdict, theta: Floats, version: int, expected: Mapping[int, set[str]]) -> None:
    seen_there = expected.get(version, ())
    right = {digest(theta), rounded_digest(theta)} if seen_there else ()
    for seen in seen_there:
        verdict.compared += 1
        if seen not in right:
            verdict.different += 1
            verdict.say(f"a model seen at version {version} is not the reference's")
