"""A relay: a server whose versions are those of another one, for readers on this side of a slow line."""
