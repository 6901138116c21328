"""What readers of a model have in common: cuts, and what comes of one."""
