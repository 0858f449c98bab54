"""Several hosts on this machine, in Linux namespaces, with real SSH, Slurm and Open MPI between them.

Each host has its own network, name, process numbers, /tmp, /dev/shm and /run. The rest of the file system is shared, so
that each host has this Python. All traffic stays on a bridge of this machine. The processes of a host end with it.
"""
