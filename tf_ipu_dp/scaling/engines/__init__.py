"""Programs of other engines, each as its own community would write it, and how they are started."""
