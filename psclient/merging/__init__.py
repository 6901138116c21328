"""Merged gradient sparsification (MGS-SGD, Shi et al., INFOCOM 2020): which tensors are pushed together.

Costs are measured during training (:mod:`~psclient.merging.costs`), plans made from them
(:mod:`~psclient.merging.plans`), and a plan is replaced between two steps (:mod:`~psclient.merging.planner`). Nothing
here touches a residual: those are kept by tensor.
"""
