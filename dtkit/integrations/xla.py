"""Refusal of graphs of TensorFlow that XLA compiles, since values can't leave them to reach other ranks."""

from __future__ import annotations

import importlib

import tensorflow as tf


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]  # AutoGraph can't read the import's code, and warns
def refuse_xla() -> None:
    """Raise NotImplementedError while a function is traced for XLA, where TensorFlow's own error names no remedy."""
    try:
        control_flow = importlib.import_module("tensorflow.python.ops.control_flow_util")  # has no public name
        is_compiled = control_flow.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    except (ImportError, AttributeError):
        return
    if is_compiled:
        raise NotImplementedError(
            "XLA compiles this graph, and its values can't leave it to reach other ranks. Use "
            "model.compile(..., jit_compile=False), or tf.function without jit_compile"
        )
