"""Files and bytes of what survives the process; :mod:`psservice.recovery.durability` gives the bytes their meaning."""
