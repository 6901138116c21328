"""A worker's calls: channels, retries, joining, pushing, pulling, leases, uploads, downloads."""
