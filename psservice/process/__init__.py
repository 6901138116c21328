"""The process: what is made once, in which order it starts, and how it ends."""
