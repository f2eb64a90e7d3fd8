"""`finback bench`: workloads, load from other processes, figures, limits, comparison, plot."""
