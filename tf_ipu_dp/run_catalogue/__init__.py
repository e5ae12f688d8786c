"""Many runs at once: what is in the folders below a folder, what differs between runs, and which of them to delete.

Reads what runs have written and never changes it, except `cleaning`. No TensorFlow. The files of a run may be damaged
or somebody else's: they are shown, never believed.
"""
