"""Private names of torch and other libraries that dtkit uses: one table, and the only place that reaches for them.

Import a name from here as from any module: ``from dtkit._util.torch_private import tree_leaves``. The first import of a
name loads torch and looks the name up. So with a torch version without it, the import of the feature's module fails,
not a run. Importing only this module doesn't load torch.

A class member is imported as a function: ``is_view(tensor)`` calls ``tensor._is_view()``. Two uses are allowed
elsewhere. A subclass may override or call protected methods of its base class, which `requires` lists here. Names that
are only compared, of operators and attributes, may be strings there.
"""

# mypy: implicit-reexport
# ruff: noqa: F401 - other modules import these names from here

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util.private_name import PrivateName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
    from torch.distributed import _functional_collectives as functional_collectives
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc as get_grad_node
    from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure
    from torch.distributed.pipelining.schedules import _Action as ScheduleAction
    from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.dropout import _DropoutNd as DropoutBase
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

    foreach_norm: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    foreach_mul_: Callable[[Sequence[torch.Tensor], torch.Tensor], None]
    foreach_copy_: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
    foreach_maximum_: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
    foreach_minimum_: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
    get_storage_id: Callable[[torch.UntypedStorage], int]
    class_trackers: Mapping[str, type]
    set_class_state: Callable[[type, Any], type]
    make_skeleton_class: Callable[..., type]
    make_skeleton_enum: Callable[..., type]
    get_sparse_values: Callable[[torch.Tensor], torch.Tensor]
    get_sparse_indices: Callable[[torch.Tensor], torch.Tensor]
    is_view: Callable[[torch.Tensor], bool]
    count_inplace_writes: Callable[[torch.Tensor], int]
    get_backward_hooks: Callable[[torch.Tensor], Any]
    get_post_accumulate_hooks: Callable[[torch.Tensor], Any]
    get_module_dict: Callable[[nn.Module], dict[str, nn.Module | None]]
    get_parameter_dict: Callable[[nn.Module], dict[str, nn.Parameter | None]]
    get_buffer_dict: Callable[[nn.Module], dict[str, torch.Tensor | None]]
    inject_parametrized_class: Callable[[nn.Module], None]
    inject_parametrized_property: Callable[[nn.Module, str], None]
    apply_style: Callable[..., nn.Module]
    call_uncompiled: Callable[..., Any]
    COMPILED_CALL: str
    is_profiling: Callable[[], bool]
    get_step_pre_hooks: Callable[[torch.optim.Optimizer], dict[int, Callable[..., Any]]]
    get_step_post_hooks: Callable[[torch.optim.Optimizer], dict[int, Callable[..., Any]]]
    run_backward: Callable[..., Any]
    break_graph_around: Callable[..., Any]
    global_step_pre_hooks: dict[int, Callable[..., Any]]
    global_step_post_hooks: dict[int, Callable[..., Any]]
    set_group_timeout: Callable[..., None] | None
    abort_groups: Callable[[], None]
    resolve_group: Callable[[str], dist.ProcessGroup]
    world_state: Any
    get_default_store: Callable[[], Any]
    count_collectives: Callable[[dist.ProcessGroup], int]
    get_mesh_groups: Callable[[DeviceMesh], dict[str, dist.ProcessGroup]] | None
    engine_app: Any
    KernelNanny: Any
    get_compile_config: Callable[[Any], Any]
    keras_masking: Any
    START_NANNY: str
    POST_P2P: str
    WAIT_P2P: str
    LAST_LR: str
    LOADER_ITERATOR: str
    CHILD_SCHEDULERS: str


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"{__name__} has no entry {name!r}: add it to PRIVATE_NAMES")
    return globals().setdefault(name, PRIVATE_NAMES[name].load())


_PYTREE, _FAKE, _DISTRIBUTED = "torch.utils._pytree", "torch._subclasses.fake_tensor", "torch.distributed"
_BACKWARD, _SCHEDULES = "torch.distributed.pipelining._backward", "torch.distributed.pipelining.schedules"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP_GROUPS = "Sharded strategies", "an unused module keeps its process groups alive"
_NO_PUBLIC = "torch has no public name for it"
_NESTED = "Batches with nested tensors", "torch has no public functions for nested containers"
_SIZES = "Memory estimates without memory", "only fake tensors run a user's forward without allocating"
_PIPELINES = "Pipeline strategies"
_CLASSES = "Classes of a notebook", "cloudpickle sets all their attributes again where they return"
_FORKS = "Engines on this host"
_REPLIES = "Calls to engines", "the client prints a line for each late reply, into whatever cell runs"
_CALLS = "Calls to engines", "a view would make ten objects a call"
_LOSSES = "Hosts that end", "only an engine's own nanny reports its end"
_SPARSE = "Sizes of sparse gradients", "the public methods refuse an uncoalesced tensor"
_CUT = "Pipeline stages", "hasattr, named_children and named_parameters omit repeated layers and tied weights"
_CACHES = "Process groups that end", "a cache of DTensor keeps meshes, and so threads and connections, alive"
_FUSED = (
    "Norms, scales, copies and extremes of many tensors",
    "one operation a tensor is slower; clip_grad_norm_ uses them",
)
_UPDATES = "Updates without a label", "the public `step` makes a label for profilers in each call"
_PARAMETRIZED = "Models with parametrizations", "torch refuses to pickle them, and has no public way to make them again"
_COMPILED_MODELS = "Compiled models", "Module.compile() skips the classes of torch.nn"
_CPU_ATTENTION = "Sharded attention on CPUs", "torch registers its sharding for GPUs only"

PRIVATE_NAMES = {
    # -- tensors and modules
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch", "TorchDispatchMode", "Observers of operations", _NO_PUBLIC
    ),
    "TreeSpec": PrivateName(_PYTREE, "TreeSpec", *_NESTED),
    "tree_flatten": PrivateName(_PYTREE, "tree_flatten", *_NESTED),
    "tree_leaves": PrivateName(_PYTREE, "tree_leaves", *_NESTED),
    "tree_map": PrivateName(_PYTREE, "tree_map", *_NESTED),
    "tree_unflatten": PrivateName(_PYTREE, "tree_unflatten", *_NESTED),
    "FakeTensorMode": PrivateName(_FAKE, "FakeTensorMode", *_SIZES),
    "is_fake": PrivateName(_FAKE, "is_fake", *_SIZES),
    "BatchNormBase": PrivateName(
        "torch.nn.modules.batchnorm", "_BatchNorm", "Checks of batch normalization", "its classes share no public base"
    ),
    "NormBase": PrivateName(
        "torch.nn.modules.batchnorm", "_NormBase", "Steps that can be undone", "norm layers share no public base"
    ),
    "DropoutBase": PrivateName(
        "torch.nn.modules.dropout", "_DropoutNd", "Checks of dropout", "dropout layers share no public base"
    ),
    "get_storage_id": PrivateName(
        "torch", "UntypedStorage._cdata", "Counts of bytes", "data_ptr is 0 for all empty or fake storages", "attribute"
    ),
    "get_sparse_values": PrivateName("torch", "Tensor._values", *_SPARSE, "method"),
    "get_sparse_indices": PrivateName("torch", "Tensor._indices", *_SPARSE, "method"),
    "is_view": PrivateName("torch", "Tensor._is_view", _PIPELINES, _NO_PUBLIC, "method"),
    "count_inplace_writes": PrivateName("torch", "Tensor._version", _PIPELINES, _NO_PUBLIC, "attribute"),
    "get_backward_hooks": PrivateName(
        "torch", "Tensor._backward_hooks", "Tensors in calls", "hooks make a tensor more than its numbers", "attribute"
    ),
    "get_post_accumulate_hooks": PrivateName(
        "torch", "Tensor._post_accumulate_grad_hooks", "Checks of models", "pickling drops the hooks", "attribute"
    ),
    "get_module_dict": PrivateName("torch.nn", "Module._modules", *_CUT, "attribute"),
    "get_parameter_dict": PrivateName("torch.nn", "Module._parameters", *_CUT, "attribute"),
    "get_buffer_dict": PrivateName("torch.nn", "Module._buffers", *_CUT, "attribute"),
    "inject_parametrized_class": PrivateName("torch.nn.utils.parametrize", "_inject_new_class", *_PARAMETRIZED),
    "inject_parametrized_property": PrivateName("torch.nn.utils.parametrize", "_inject_property", *_PARAMETRIZED),
    # -- optimizers and loaders
    "foreach_norm": PrivateName("torch", "_foreach_norm", *_FUSED),
    "foreach_mul_": PrivateName("torch", "_foreach_mul_", *_FUSED),
    "foreach_copy_": PrivateName("torch", "_foreach_copy_", *_FUSED),
    "foreach_maximum_": PrivateName("torch", "_foreach_maximum_", *_FUSED),
    "foreach_minimum_": PrivateName("torch", "_foreach_minimum_", *_FUSED),
    "is_profiling": PrivateName("torch.autograd", "_profiler_enabled", *_UPDATES),
    "get_step_pre_hooks": PrivateName("torch.optim", "Optimizer._optimizer_step_pre_hooks", *_UPDATES, "attribute"),
    "get_step_post_hooks": PrivateName("torch.optim", "Optimizer._optimizer_step_post_hooks", *_UPDATES, "attribute"),
    "global_step_pre_hooks": PrivateName("torch.optim.optimizer", "_global_optimizer_pre_hooks", *_UPDATES),
    "global_step_post_hooks": PrivateName("torch.optim.optimizer", "_global_optimizer_post_hooks", *_UPDATES),
    "run_backward": PrivateName(
        "torch.autograd.graph",
        "_engine_run_backward",
        "Backward passes from a given gradient",
        "the public function loads sympy, for shapes that a plain tensor doesn't have",
    ),
    "break_graph_around": PrivateName(
        "torch.optim.optimizer",
        "_use_grad_for_differentiable",
        "Optimizers without torch's compiler",
        "it loads the compiler",
    ),
    "LAST_LR": PrivateName(
        "torch.optim.lr_scheduler", "LRScheduler._last_lr", "Schedules of a changed rate", _NO_PUBLIC, "key"
    ),
    "CHILD_SCHEDULERS": PrivateName(
        "torch.optim.lr_scheduler", "SequentialLR._schedulers", "Schedules of a changed rate", _NO_PUBLIC, "key"
    ),
    "LOADER_ITERATOR": PrivateName(
        "torch.utils.data", "DataLoader._iterator", "Loaders with workers", "nothing public ends the workers", "key"
    ),
    "shut_down_workers": PrivateName(
        "torch.utils.data.dataloader",
        "_MultiProcessingDataLoaderIter._shutdown_workers",
        "Loaders with workers",
        "nothing public ends the workers",
        "method",
    ),
    # -- process groups
    "set_group_timeout": PrivateName(
        f"{_DISTRIBUTED}.distributed_c10d",
        "_set_pg_timeout",
        "Changed timeouts of collectives",
        "without it the timeout stays as the group was formed",
        is_optional=True,
    ),
    "abort_groups": PrivateName(
        f"{_DISTRIBUTED}.distributed_c10d", "_abort_process_group", "Interrupts of NCCL", _NO_PUBLIC
    ),
    "resolve_group": PrivateName(
        f"{_DISTRIBUTED}.distributed_c10d", "_resolve_process_group", "Explained collectives", _NO_PUBLIC
    ),
    "get_default_store": PrivateName(
        f"{_DISTRIBUTED}.distributed_c10d", "_get_default_store", "Horovod's join", _NO_PUBLIC
    ),
    "world_state": PrivateName(
        f"{_DISTRIBUTED}.distributed_c10d", "_world", "Groups that are formed again", "torch doesn't list its groups"
    ),
    "count_collectives": PrivateName(
        _DISTRIBUTED,
        "ProcessGroup._get_sequence_number_for_group",
        "Detections of stuck ranks",
        _NO_PUBLIC,
        "method",
    ),
    "functional_collectives": PrivateName(
        f"{_DISTRIBUTED}._functional_collectives",
        "",
        "Timings of collectives in layers",
        "DTensor calls these functions",
    ),
    "AsyncCollectiveTensor": PrivateName(
        f"{_DISTRIBUTED}._functional_collectives",
        "AsyncCollectiveTensor",
        "Shards of DTensors",
        "a part of a DTensor may be a collective that runs",
    ),
    "get_mesh_groups": PrivateName(
        f"{_DISTRIBUTED}.device_mesh",
        "DeviceMesh._pg_registry",
        "Process groups that end",
        "a mesh keeps its groups alive",
        "attribute",
        is_optional=True,
    ),
    "clear_sharding_cache": PrivateName(
        "torch", "_C._clear_DTensor_sharding_propagator_cache", *_CACHES, is_optional=True
    ),
    "clear_propagation_cache": PrivateName(
        f"{_DISTRIBUTED}.tensor",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
        *_CACHES,
        is_optional=True,
    ),
    "clear_transform_cache": PrivateName(
        f"{_DISTRIBUTED}.tensor._redistribute", "_gen_transform_infos.cache_clear", *_CACHES, is_optional=True
    ),
    "clear_planner_cache": PrivateName(
        f"{_DISTRIBUTED}.tensor._redistribute", "clear_redistribute_planner_cache", *_CACHES, is_optional=True
    ),
    "clear_topology_cache": PrivateName(
        f"{_DISTRIBUTED}.tensor._collective_utils",
        "MeshTopoInfo.build_from_mesh.cache_clear",
        *_CACHES,
        is_optional=True,
    ),
    # -- strategies
    "get_fsdp_state": PrivateName(
        f"{_DISTRIBUTED}.fsdp", "FSDPModule._get_fsdp_state", "Sharded strategies", _NO_PUBLIC, "method"
    ),
    "get_fsdp_groups": PrivateName(
        _FSDP, "FSDPState._fsdp_param_groups", *_FSDP_GROUPS, "attribute", since="2.12", is_optional=True
    ),
    "get_fsdp_group": PrivateName(_FSDP, "FSDPState._fsdp_param_group", *_FSDP_GROUPS, "attribute"),  # before 2.12
    "apply_style": PrivateName(
        f"{_DISTRIBUTED}.tensor.parallel",
        "ParallelStyle._apply",
        "Tensor-parallel layers",
        "a style is applied, and defined, by this method alone",
        "method",
    ),
    "cpu_attention": PrivateName(
        "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", *_CPU_ATTENTION, is_optional=True
    ),
    "cpu_attention_backward": PrivateName(
        "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", *_CPU_ATTENTION, is_optional=True
    ),
    "get_grad_node": PrivateName(
        _BACKWARD, "_get_grad_fn_or_grad_acc", _PIPELINES, "dtkit must predict how torch splits a backward pass"
    ),
    "construct_reverse_graph": PrivateName(
        _BACKWARD, "construct_reverse_graph", _PIPELINES, "dtkit must predict how torch splits a backward pass"
    ),
    "reverse_closure": PrivateName(
        _BACKWARD, "reverse_closure", _PIPELINES, "dtkit must predict how torch splits a backward pass"
    ),
    "ScheduleAction": PrivateName(_SCHEDULES, "_Action", _PIPELINES, "a custom schedule consists of them"),
    "ComputationType": PrivateName(_SCHEDULES, "_ComputationType", _PIPELINES, "a custom schedule consists of them"),
    "PipelineScheduleRuntime": PrivateName(
        _SCHEDULES,
        "_PipelineScheduleRuntime",
        _PIPELINES,
        "it alone runs a custom schedule",
        requires=("_prepare_schedule_with_comms", "_maybe_compute_loss", "_maybe_get_loss", "_loss_fn"),
    ),
    "PipelineStage": PrivateName(
        "torch.distributed.pipelining",
        "PipelineStage",
        _PIPELINES,
        "the class is public, but its methods that dtkit overrides are undocumented",
        requires=(
            "forward_one_chunk",
            "forward_maybe_with_nosync",
            "backward_one_chunk",
            "backward_weight_one_chunk",
            "get_fwd_send_ops",
            "get_fwd_recv_ops",
            "get_bwd_send_ops",
            "get_bwd_recv_ops",
            "clear_runtime_states",
            "fwd_cache",
            "bwd_cache",
        ),
    ),
    "step_micro_batches": PrivateName(
        _SCHEDULES, "_PipelineSchedule._step_microbatches", _PIPELINES, "the public `step` splits batches", "method"
    ),
    "COMPILED_CALL": PrivateName("torch.nn", "Module._compiled_call_impl", *_COMPILED_MODELS, "key"),
    "call_uncompiled": PrivateName("torch.nn", "Module._call_impl", *_COMPILED_MODELS, "method"),
    "POST_P2P": PrivateName(_SCHEDULES, "_batch_p2p", _PIPELINES, "dtkit replaces it to time messages", "key"),
    "WAIT_P2P": PrivateName(_SCHEDULES, "_wait_batch_p2p", _PIPELINES, "dtkit replaces it to time messages", "key"),
    # -- ipyparallel (9.2 and later), for cluster.transport alone
    "get_client_engines": PrivateName("ipyparallel", "Client._engines", *_CALLS, "attribute", "9.2"),
    "get_client_futures": PrivateName("ipyparallel", "Client._futures", *_REPLIES, "attribute", "9.2"),
    "get_client_handlers": PrivateName("ipyparallel", "Client._queue_handlers", *_REPLIES, "attribute", "9.2"),
    "get_client_loop": PrivateName("ipyparallel", "Client._io_loop", *_LOSSES, "attribute", "9.2"),
    "get_query_stream": PrivateName("ipyparallel", "Client._query_stream", *_LOSSES, "attribute", "9.2"),
    "get_main_stream": PrivateName("ipyparallel", "Client._mux_stream", *_CALLS, "attribute", "9.2"),
    "engine_app": PrivateName("ipyparallel.engine.app", "", _FORKS, "its nanny is replaced there", since="9.2"),
    "START_NANNY": PrivateName(
        "ipyparallel.engine.app", "start_nanny", _FORKS, "dtkit replaces it to fork the nanny", "key", "9.2"
    ),
    "KernelNanny": PrivateName("ipyparallel.engine.nanny", "KernelNanny", _FORKS, "it has no public name", since="9.2"),
    # -- cloudpickle, for rpc.unpickling alone
    "class_trackers": PrivateName("cloudpickle.cloudpickle", "_DYNAMIC_CLASS_TRACKER_BY_ID", *_CLASSES, since="3.0"),
    "set_class_state": PrivateName("cloudpickle.cloudpickle", "_class_setstate", *_CLASSES, since="3.0"),
    "make_skeleton_class": PrivateName("cloudpickle.cloudpickle", "_make_skeleton_class", *_CLASSES, since="3.0"),
    "make_skeleton_enum": PrivateName("cloudpickle.cloudpickle", "_make_skeleton_enum", *_CLASSES, since="3.0"),
    # -- Keras
    "get_compile_config": PrivateName(
        "keras", "Model._compile_config", "Compiled Keras models", "the public form lacks classes", "attribute", "3.15"
    ),
    "get_keras_schedule": PrivateName(
        "keras", "Optimizer._learning_rate", "Schedules of Keras", "the public name is their current value", "attribute"
    ),
    "uses_weight_decay": PrivateName(
        "keras", "Optimizer._use_weight_decay", "Optimizers of Keras", "their configuration leaves it out", "method"
    ),
    "keras_masking": PrivateName("keras.src.backend.common.masking", "", "Masks", "no public name", since="3.10"),
}
"""Private names by the name under which dtkit imports them."""
