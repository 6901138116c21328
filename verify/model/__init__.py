"""What the servers must have: the independent reference, and images of replicas."""
