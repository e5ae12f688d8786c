"""The parts of `poprun`: its options, the job, the hosts, the processes and their supervisor, rendezvous and output.

Imports no TensorFlow, except in `preload` for the instances that are forked, and does not depend on the programs
that it starts.
"""
