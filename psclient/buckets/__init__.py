"""Merged gradient sparsification (MGS-SGD, Shi et al., INFOCOM 2020): which tensors are pushed together.

Costs are measured during training (:mod:`~psclient.buckets.costs`), plans made from them
(:mod:`~psclient.buckets.plans`), and a plan is replaced between two steps (:mod:`~psclient.buckets.planner`). Nothing
here touches a residual: those are kept by tensor.
"""
