"""What would a user pick instead? Seconds until the same loss, on networks of known rate and delay."""
