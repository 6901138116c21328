"""WAGMA-SGD on the server (Li et al., IEEE TPDS 2021): schedule, rounds, replicas."""
