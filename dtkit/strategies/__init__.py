"""One parallelism a file, each an instance that the user passes to `train`."""
