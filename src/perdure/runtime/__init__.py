"""What several rooms need of the machine and its processes: ports, heartbeats, devices, groups."""
