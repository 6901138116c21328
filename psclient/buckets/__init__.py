"""Merged gradient sparsification (MGS-SGD, Shi et al., INFOCOM 2020): which tensors are pushed together.

Buckets by size are the default. Opt-in, costs are measured during training, plans made from them, and a plan is
replaced between two steps. Nothing here touches a residual: those are kept by tensor.
"""
