"""Whether a campaign held: verdicts, process samples, server readings."""
