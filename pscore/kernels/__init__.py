"""The loops over all elements: accumulate, select, count. One file a backend; :mod:`pscore.kernels.base` says what."""
