"""Workers as processes: raw ones that push noise, real ones that train, and their books."""
