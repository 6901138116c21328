"""Files that survive the process; :mod:`psservice.durability.durability` gives their bytes a meaning."""
