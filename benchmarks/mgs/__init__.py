"""What section *merging* measures with: the paper's four models, a slow link, and gradients that come on a schedule."""
