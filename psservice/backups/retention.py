"""Which backups of a run go when a new one has come."""

from collections.abc import Sequence

from psservice.backups.manifest import BackupManifest

_DAY_SECONDS = 24 * 3600.0


def expired(
    backups: Sequence[BackupManifest], newest: BackupManifest, keep: int | None, keep_days: float | None
) -> list[BackupManifest]:
    """Return the backups that neither rule keeps, oldest first: the last ``keep``, and those of ``keep_days``.

    Only backups of the run of ``newest`` count, and none whose checkpoint an operator has named: that is kept until
    somebody deletes it, as at the shards. ``newest`` itself is never returned.
    """
    ours = sorted(
        (each for each in backups if each.run_id == newest.run_id and not each.is_named),
        key=lambda each: each.exported_unix_seconds,
    )
    kept = {each.checkpoint for each in ours[len(ours) - keep :]} if keep is not None else set()
    if keep_days is not None:
        since = newest.exported_unix_seconds - keep_days * _DAY_SECONDS
        kept |= {each.checkpoint for each in ours if each.exported_unix_seconds >= since}
    return [each for each in ours if each.checkpoint not in kept and each.checkpoint != newest.checkpoint]
