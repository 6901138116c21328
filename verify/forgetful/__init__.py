"""A file system that forgets what was not synced when its power is cut."""
