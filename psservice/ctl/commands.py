"""Operators' commands. Each reads the fleet's status first, acts, prints, and returns its exit status."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl import render
from psservice.ctl.asking import agreed
from psservice.ctl.client import EXIT_REFUSED, OperateError, Outcome, ShardClients, exit_status
from psservice.ctl.fleet import Fleet, disagreement, read_fleet


class MixedShardsError(Exception):
    """The addresses are not those of all shards of one run, each once; nothing was done."""


def status(clients: ShardClients, options: Namespace) -> int:
    """Print version, parameters, device, workers, staleness and bytes of each shard."""
    return _show(clients, options, lambda fleet: plain(fleet.shards), render.print_statuses)


def workers(clients: ShardClients, options: Namespace) -> int:
    """Print the workers of all shards as one table."""
    return _show(clients, options, render.workers_plain, render.print_workers)


def _show(
    clients: ShardClients, options: Namespace, plain: Callable[[Fleet], object], show: Callable[[Fleet], None]
) -> int:
    fleet = read_fleet(clients)
    if options.output != "table":
        render.print_plain(plain(fleet), options.output)
    elif fleet.reached:
        show(fleet)
    render.say_errors(fleet.shards)
    return exit_status(fleet.shards)


def finish(clients: ShardClients, options: Namespace) -> int:
    """End the run at each shard that answers; print the last version and the path of the final model."""
    fleet = one_run(clients)
    every = ",".join(fleet.reached)
    if not agreed(f"Ends the run at {len(fleet.reached)} shards: every worker's loop ends, for good.", options):
        return EXIT_REFUSED

    def words(answer: pb.FinishRunResponse) -> str:
        model = answer.final_model or f"not written without --final-model; `psclient save {every} --out FILE` does it"
        return f"finished at version {answer.version}; final model: {model}"

    return report(ask_all(clients, fleet, "FinishRun", pb.FinishRunRequest()), words, options)


def restore(clients: ShardClients, options: Namespace) -> int:
    """Take every shard back to a version or a checkpoint; if one of them cannot go back there, none does."""
    fleet = one_run(clients)
    if fleet.unreached:
        return nothing_done(fleet, fleet.unreached, "no shard was taken back", options)
    request = pb.RestoreModelRequest(checkpoint=options.checkpoint or "")
    if options.version is not None:
        request = pb.RestoreModelRequest(version=options.version)
    if options.dry_run:
        return _report_restore(_begin_restore(clients, fleet, request, pb.RESTORE_STEP_CHECK), fleet, options)
    target = f"version {options.version}" if options.version is not None else f"checkpoint {options.checkpoint}"
    versions = render.range_of([status.version for status in fleet.reached.values()])
    what = f"Takes {len(fleet.reached)} shards from version {versions} back to {target}; workers follow."
    if not agreed(what, options):
        return EXIT_REFUSED
    prepared = _begin_restore(clients, fleet, request, pb.RESTORE_STEP_PREPARE)
    unable = [each for each in prepared if each.error is not None]
    step = pb.RESTORE_STEP_ABANDON if unable else pb.RESTORE_STEP_COMMIT
    following = {
        each.address: pb.RestoreModelRequest(step=step, ticket=each.answer.ticket)
        for each in prepared
        if each.error is None
    }
    done = clients.each("RestoreModel", following)
    if unable:
        return nothing_done(fleet, unable, "no shard was taken back", options)
    return report(
        done, lambda answer: f"back at version {answer.version}; workers pull it with their next step", options
    )


def _begin_restore(
    clients: ShardClients, fleet: Fleet, request: pb.RestoreModelRequest, step: "pb.RestoreStep.ValueType"
) -> list[Outcome]:
    """Have shards, shard 0 first, take a step; those of a feed go back to the publication that shard 0 had."""
    request.step = step
    first, *others = fleet.reached
    begun = [clients.one(first, "RestoreModel", request)]
    answer = begun[0].answer
    if answer is not None and answer.publication:
        request = pb.RestoreModelRequest(step=step, version=answer.version, publication=answer.publication)
    return begun + (clients.all("RestoreModel", request, others) if answer is not None else [])


def _report_restore(checked: Sequence[Outcome], fleet: Fleet, options: Namespace) -> int:
    """Report to which version each shard could go back, of a command that changes nothing."""
    unable = [each for each in checked if each.error is not None]
    if unable:
        return nothing_done(fleet, unable, "no shard could be taken back", options)
    now = {address: status.version for address, status in fleet.reached.items()}
    if options.output != "table":
        told = [each | {"dry_run": True, "version_now": now[each["address"]]} for each in plain(checked)]
        render.print_plain(told, options.output)
        return exit_status(checked)
    for each in checked:
        render.say(f"{each.address}: would go back from version {now[each.address]} to {each.answer.version}")
    return exit_status(checked)


def evict(clients: ShardClients, options: Namespace) -> int:
    """End a worker's lease at every shard; it is enough that one shard knows the worker."""
    worker, seconds = options.worker, options.ban_seconds
    request = pb.EvictWorkerRequest(worker_id=worker, ban_seconds=seconds)
    ban = f", kept out for {seconds:g} s" if seconds else ""

    def words(answer: pb.EvictWorkerResponse) -> str:
        if answer.had_lease:
            return f"{worker!r} evicted after step {answer.last_step}{ban or ', may join again at once'}"
        return f"{worker!r} had no lease{ban or ', and is kept out no longer'}"

    outcomes = ask_all(clients, one_run(clients), "EvictWorker", request)
    return report(outcomes, words, options, {ErrorCode.NO_SUCH_WORKER: f"{worker!r} had no lease here"})


def take_snapshots(clients: ShardClients, addresses: Sequence[str], name: str = "") -> list[Outcome]:
    """Take a snapshot at each of these shards, in the order of indices: without a name, shard 0 draws an id for all."""
    outcomes: list[Outcome] = []
    for address in addresses:
        first = outcomes[0] if outcomes else None
        if first is not None and first.error is not None:
            why = OperateError(f"{address}: not asked, since {first.error}", refused=first.error.refused)
            outcomes.append(Outcome(address, error=why))
            continue
        request = pb.TakeSnapshotRequest(checkpoint=first.answer.checkpoint if first else name)
        outcomes.append(clients.one(address, "TakeSnapshot", request))
    return outcomes


def one_run(clients: ShardClients) -> Fleet:
    """Read the fleet's status before a command acts; raises :class:`MixedShardsError`."""
    fleet = read_fleet(clients)
    if wrong := disagreement(fleet.reached):
        raise MixedShardsError(f"{wrong}; nothing was done. Give the addresses of one run's shards, each once")
    total = max((status.num_shards for status in fleet.reached.values()), default=0)
    if len(clients.addresses) < total:
        raise MixedShardsError(
            f"{len(clients.addresses)} of the run's {total} shards were named; nothing was done. Give all addresses"
        )
    return fleet


def ask_all(clients: ShardClients, fleet: Fleet, rpc: str, request: Message) -> list[Outcome]:
    """Call every shard that gave its status; the outcome of the others is their error."""
    asked = {each.address: each for each in clients.all(rpc, request, [*fleet.reached])}
    return [asked.get(shard.address, shard) for shard in fleet.shards]


def nothing_done(fleet: Fleet, unable: Sequence[Outcome], what: str, options: Namespace) -> int:
    """Report the shards that cannot do it, without which nothing is done."""
    if options.output != "table":
        render.print_plain(plain(unable), options.output)
    render.say_errors(unable)
    render.say(f"{what}: it takes all {len(fleet.shards)} shards", failed=True)
    return exit_status(unable)


def report(
    outcomes: Sequence[Outcome],
    words: Callable[[Any], str],
    options: Namespace,
    unknown: dict[ErrorCode, str] | None = None,
) -> int:
    """Print the outcomes of a call to each shard, answers in these words; return the exit status.

    ``unknown`` has words for a name that a shard does not know; that is a failure only if no shard knows the name.
    """
    unknown = unknown or {}
    strange = [each for each in outcomes if each.error is not None and each.error.reason in unknown]
    counted = [each for each in outcomes if each not in strange] or outcomes
    if options.output != "table":
        render.print_plain(plain(outcomes), options.output)
    else:
        for each in counted:
            if each.error is None:
                render.say(f"{each.address}: {words(each.answer)}")
    render.say_errors(counted)
    if options.output == "table" and counted is not outcomes:
        for each in strange:
            render.say(f"{each.address}: {' '.join(unknown.values())}")
    return exit_status(counted)


def plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return outcomes for JSON."""
    return [render.outcome_plain(each) for each in outcomes]
