"""A worker's calls: channels, retries, joining, pushing, pulling, heartbeats, uploads, downloads."""
