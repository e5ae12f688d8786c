"""Makes and repairs the Python environment that the wrappers in launch/ run in.

Owns which versions belong to which Python, virtual environments, the Horovod build and its cache.
Standard library only, and nothing else of the package: when this runs, nothing is installed yet.
"""
