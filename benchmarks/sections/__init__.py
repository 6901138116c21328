"""The sections of ``make bench``, a file each."""
