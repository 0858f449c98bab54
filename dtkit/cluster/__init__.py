"""Starting, finding, taking over and ending a cluster's processes, and the facade `Cluster`."""
