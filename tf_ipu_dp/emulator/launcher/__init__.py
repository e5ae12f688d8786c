"""The parts of `poprun`: options, hosts, placement, processes, preloading, rendezvous, output."""
