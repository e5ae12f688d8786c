"""What executes programs of the device: replicas, executions, collectives, instances, feeds, random numbers."""
