"""Speedups that others have reported, to stand beside ours."""

PUBLISHED_WORKERS = (1, 2, 4, 8, 16)

PUBLISHED = {
    1e9: {"DGS": (1.00, 1.99, 3.87, 7.33, 12.61), "ASGD": (0.30, 0.44, 0.73, 0.89, 0.86)},
    10e9: {"DGS": (1.00, 2.00, 3.99, 7.68, 13.97), "ASGD": (0.68, 1.28, 2.31, 3.28, 3.91)},
}
"""ImageNet, ResNet-18, over one worker, by bits a second of the links: Yan et al., "Dual-Way Gradient Sparsification
for Asynchronous Distributed Deep Learning", ICPP 2020."""
