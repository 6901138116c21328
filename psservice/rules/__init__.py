"""Update rules, one file each: how the server applies a push to its parameters."""
