"""Files that survive the process; :mod:`psservice.recovery.durability` gives their bytes a meaning."""
