"""Does sparse both ways cost accuracy? Simulated runs say which real ones are worth their hours."""
