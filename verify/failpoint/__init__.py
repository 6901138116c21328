"""What is broken on purpose: processes, disks, connections, clocks, bytes."""
