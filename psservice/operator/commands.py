"""What an operator does to running servers. Each command looks first, acts, prints, and returns its exit status."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator import render
from psservice.operator.client import Lines, OperateError, Outcome, exit_status
from psservice.operator.fleet import Look, disagreement, look


class MixedShardsError(Exception):
    """The addresses are not those of all shards of one run, each once; nothing was done."""


def status(lines: Lines, *, as_json: bool) -> int:
    """Print version, parameters, device, workers, staleness and bytes of each shard."""
    found = look(lines)
    outcomes = [Outcome(shard.address, shard.status, shard.error) for shard in found.shards]
    if as_json:
        _print_json(outcomes)
    else:
        render.print_statuses(found)
    _complain(outcomes)
    return exit_status(outcomes)


def workers(lines: Lines, *, as_json: bool) -> int:
    """Print the workers of all shards as one table."""
    found = look(lines)
    outcomes = [Outcome(shard.address, shard.status, shard.error) for shard in found.shards]
    if as_json:
        print(json.dumps(render.workers_plain(found), indent=2))
    elif found.reached:
        render.print_workers(found)
    _complain(outcomes)
    return exit_status(outcomes)


def finish(lines: Lines, *, as_json: bool) -> int:
    """End the run at each shard that answers; print the last version and where the final model is."""
    found = one_run(lines)
    every = ",".join(found.reached)

    def words(answer: pb.FinishRunResponse) -> str:
        model = answer.final_model or f"not written without --final-model; `psclient save {every} --out FILE` does it"
        return f"finished at version {answer.version}; final model: {model}"

    return report(ask_all(lines, found, "FinishRun", pb.FinishRunRequest()), words, as_json=as_json)


def snapshot(lines: Lines, *, as_json: bool, name: str) -> int:
    """Take one checkpoint over all shards, with a name or an id; where one does not answer, none is taken."""
    found = one_run(lines)
    if found.errors:
        return _nothing_done(found, "no snapshot was taken", as_json=as_json)

    def words(answer: pb.TakeSnapshotResponse) -> str:
        return f"checkpoint {answer.checkpoint or '(of this shard alone)'}, version {answer.version}: {answer.path}"

    return report(take_snapshots(lines, [*found.reached], name), words, as_json=as_json)


def restore(lines: Lines, *, as_json: bool, version: int | None, checkpoint: str) -> int:
    """Take every shard back to a version or a checkpoint; where one does not answer, none is."""
    found = one_run(lines)
    if found.errors:
        return _nothing_done(found, "no shard was taken back", as_json=as_json)
    request = pb.RestoreModelRequest(checkpoint=checkpoint)
    if version is not None:
        request = pb.RestoreModelRequest(version=version)

    def words(answer: pb.RestoreModelResponse) -> str:
        return f"back at version {answer.version}; workers pull it with their next step"

    return report(lines.all("RestoreModel", request, [*found.reached]), words, as_json=as_json)


def evict(lines: Lines, *, as_json: bool, worker_id: str, ban_seconds: float) -> int:
    """End a worker's lease at every shard; shards that know nothing of it are no failure if another one does."""
    request = pb.EvictWorkerRequest(worker_id=worker_id, ban_seconds=ban_seconds)
    outcomes = ask_all(lines, one_run(lines), "EvictWorker", request)
    ban = f", kept out for {ban_seconds:g} s" if ban_seconds else ""

    def words(answer: pb.EvictWorkerResponse) -> str:
        if answer.had_lease:
            return f"{worker_id!r} evicted after step {answer.last_step}{ban or ', may join again at once'}"
        return f"{worker_id!r} had no lease{ban or ', and is kept out no longer'}"

    return report_known(outcomes, words, ErrorCode.NO_SUCH_WORKER, f"{worker_id!r} had no lease here", as_json=as_json)


def take_snapshots(lines: Lines, addresses: Sequence[str], name: str = "") -> list[Outcome]:
    """Take a snapshot at each of these shards, which come by index: without a name, shard 0 draws an id for all."""
    outcomes: list[Outcome] = []
    for address in addresses:
        first = outcomes[0] if outcomes else None
        if first is not None and first.error is not None:
            why = OperateError(f"{address}: not asked, since {first.error}", refused=first.error.refused)
            outcomes.append(Outcome(address, error=why))
            continue
        request = pb.TakeSnapshotRequest(checkpoint=first.answer.checkpoint if first else name)
        outcomes.append(lines.one(address, "TakeSnapshot", request))
    return outcomes


def one_run(lines: Lines) -> Look:
    """Look at all shards before anything is done to one.

    Raises:
        MixedShardsError: those that answer do not belong together, or are not all that the run has.
    """
    found = look(lines)
    if wrong := disagreement(found.reached):
        raise MixedShardsError(f"{wrong}; nothing was done. Give the addresses of one run's shards, each once")
    total = max((status.num_shards for status in found.reached.values()), default=0)
    if len(lines.addresses) < total:
        raise MixedShardsError(
            f"{len(lines.addresses)} of the run's {total} shards were named; nothing was done. Give all addresses"
        )
    return found


def ask_all(lines: Lines, found: Look, rpc: str, request: Message) -> list[Outcome]:
    """Ask every shard that has answered a look; what the others said to that is their outcome."""
    asked = {each.address: each for each in lines.all(rpc, request, [*found.reached])}
    return [asked.get(shard.address, Outcome(shard.address, error=shard.error)) for shard in found.shards]


def _nothing_done(found: Look, what: str, *, as_json: bool) -> int:
    """Say that shards are missing, without which nothing is done."""
    outcomes = [Outcome(address, error=error) for address, error in found.errors.items()]
    if as_json:
        _print_json(outcomes)
    _complain(outcomes)
    render.say(f"{what}: it takes all {len(found.shards)} shards", failed=True)
    return exit_status(outcomes)


def report(outcomes: Sequence[Outcome], words: Callable[[Any], str], *, as_json: bool) -> int:
    """Print what became of a call to each shard, answers in the words given; return the exit status."""
    if as_json:
        _print_json(outcomes)
        _complain(outcomes)
    else:
        _say(outcomes, words)
    return exit_status(outcomes)


def report_known(
    outcomes: Sequence[Outcome], words: Callable[[Any], str], unknown: ErrorCode, unknown_words: str, *, as_json: bool
) -> int:
    """Report what became of a call that is about a name; not to know it fails only where no shard does."""
    unsynced = [each for each in outcomes if each.error is not None and each.error.reason is unknown]
    counted = [each for each in outcomes if each not in unsynced] or outcomes
    if as_json:
        _print_json(outcomes)
        _complain(counted)
    else:
        _say(counted, words)
        for each in unsynced if counted is not outcomes else ():
            render.say(f"{each.address}: {unknown_words}")
    return exit_status(counted)


def _say(outcomes: Sequence[Outcome], words: Callable[[Any], str]) -> None:
    for each in outcomes:
        if each.error is None:
            render.say(f"{each.address}: {words(each.answer)}")
    _complain(outcomes)


def _complain(outcomes: Sequence[Outcome]) -> None:
    for each in outcomes:
        if each.error is not None:
            render.say(str(each.error), failed=True)


def _print_json(outcomes: Sequence[Outcome]) -> None:
    print(json.dumps([render.outcome_plain(each) for each in outcomes], indent=2))
