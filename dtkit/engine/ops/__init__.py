"""Operations that an engine does for the notebook, one module for each subject of :mod:`dtkit.rpc.protocol`."""
