"""Which names of the SDK's public API the emulator has: `python -m tf_ipu_dp.emulator.coverage` prints Markdown.

The list of names is the SDK's: those of releases 3.1 to 3.4, and the modules that releases up to 3.0 had besides. Each
is looked up in the code: it is either emulated, or refused with a reason. The docstrings of the modules describe the
limits of what is emulated.
"""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Optional, Tuple

from tf_ipu_dp import emulator
from tf_ipu_dp.emulator import refusal

SDK: Dict[str, Tuple[str, ...]] = {
    "tensorflow.python.ipu.config": (
        "DeviceConnectionType", "ExecutionProfileType", "IPUConfig", "MergeRemoteBuffersBehaviour",
        "SchedulingAlgorithm", "SelectionOrder", "StochasticRoundingBehaviour", "configure_ipu_system",
        "get_ipu_config", "reset_ipu_configuration", "running_on_ipu_model",
    ),
    "tensorflow.python.ipu.ipu_strategy": ("IPUStrategy", "IPUStrategyV1"),
    "tensorflow.python.ipu.distributed": ("allgather", "allreduce", "broadcast"),
    "tensorflow.python.ipu.distributed.host_collective_ops": ("allgather", "allreduce", "broadcast"),
    "tensorflow.python.ipu.distributed.popdist_strategy": ("PopDistStrategy",),
    "tensorflow.python.ipu.horovod": (
        "Adasum", "Average", "Sum", "allgather", "allreduce", "broadcast", "init", "local_rank", "local_size", "rank",
        "shutdown", "size",
    ),
    "tensorflow.python.ipu.horovod.ipu_horovod_strategy": ("IPUHorovodStrategy",),
    "tensorflow.python.ipu.horovod.popdist_strategy": ("PopDistStrategy",),
    "tensorflow.python.ipu.keras": ("PipelineStage",),
    "tensorflow.python.ipu.keras.layers": (
        "AssumeEqualAcrossReplicas", "CTCInferenceLayer", "CTCPredictionsLayer", "Dropout", "EffectiveTransformer",
        "Embedding", "GRU", "GroupNorm", "GroupNormalization", "InstanceNorm", "InstanceNormalization", "LSTM",
        "LayerNorm", "LayerNormalization", "PopnnGRU", "PopnnLSTM", "RecomputationCheckpoint", "SerialDense",
    ),
    "tensorflow.python.ipu.keras.optimizers": (
        "CrossReplicaOptimizer", "GradientAccumulationOptimizer", "IpuOptimizer", "MapGradientOptimizer",
    ),
    "tensorflow.python.ipu.utils": (
        "DeviceConnectionType", "ExecutionProfileType", "IPUConfig", "IpuOptions", "MergeRemoteBuffersBehaviour",
        "SchedulingAlgorithm", "SelectionOrder", "SyntheticDataCategory", "configure_ipu_system",
        "export_dataset_to_file", "export_inputs_to_file", "export_variables_from_live_model",
        "export_variables_from_live_session", "get_ipu_config", "get_num_of_ipus_in_device",
        "import_data_in_live_model", "import_data_in_live_session", "move_variable_initialization_to_cpu",
        "reset_ipu_configuration", "reset_ipu_seed", "running_on_ipu_model", "use_synthetic_data_for",
    ),
    "tensorflow.python.ipu.ipu_infeed_queue": ("IPUInfeedQueue", "IPUIterator", "IPUOwnedIterator"),
    "tensorflow.python.ipu.ipu_outfeed_queue": (
        "IPUOutfeedMode", "IPUOutfeedQueue", "IPUOutfeedQueueIterator", "ScopedIPUOutfeedQueue",
    ),
    "tensorflow.python.ipu.loops": ("repeat", "while_loop"),
    "tensorflow.python.ipu.ipu_compiler": ("compile",),
    "tensorflow.python.ipu.scopes": (
        "frontend_attribute", "ipu_jit_scope", "ipu_scope", "ipu_shard", "outside_compilation_scope",
        "partials_type", "stochastic_rounding",
    ),
    "tensorflow.python.ipu.sharding": (
        "dependencies", "enable_sharded_gradient_tape", "get_shard_from_colocation", "get_sharding", "has_attr",
        "propagate_sharding",
    ),
    "tensorflow.python.ipu.gradient_accumulation": ("GradientAccumulationReductionMethod",),
    "tensorflow.python.ipu.optimizers": (
        "CrossReplicaGradientAccumulationOptimizer", "CrossReplicaGradientAccumulationOptimizerV2",
        "CrossReplicaOptimizer", "GradientAccumulationOptimizer", "GradientAccumulationOptimizerV2",
        "GradientAccumulationReductionMethod", "IpuOptimizer", "MapGradientOptimizer", "ShardedOptimizer",
    ),
    "tensorflow.python.ipu.serving": ("export_keras", "export_pipeline", "export_single_step"),
    "tensorflow.python.ipu.dataset_benchmark": ("dataset_benchmark", "infeed_benchmark"),
    "tensorflow.python.ipu.dataset_extractor": ("dataset_extractor",),
    "tensorflow.python.ipu.data.ops.dataset_ops": ("BufferDataset",),
    "tensorflow.python.ipu.keras_extensions": ("KerasExtensions",),
    "tensorflow.python.ipu.eager.backprop": ("GradientCaptureContext", "GradientCaptureTape"),
    "tensorflow.python.ipu.ipu_estimator": ("IPUEstimator",),
    "tensorflow.python.ipu.ipu_pipeline_estimator": ("IPUPipelineEstimator",),
    "tensorflow.python.ipu.ipu_run_config": ("IPURunConfig", "RunConfig"),
    "tensorflow.python.ipu.ipu_session_run_hooks": ("IPULoggingTensorHook",),
    "tensorflow.python.ipu.ipu_multi_worker_strategy": ("IPUMultiWorkerStrategyV1",),
    "tensorflow.python.ipu.vertex_edsl": ("PlaceholderVertexExpr",),
    "tensorflow.python.ipu.ops.all_to_all_op": ("all_gather", "all_to_all"),
    "tensorflow.python.ipu.ops.application_compile_op": ("experimental_application_compile_op",),
    "tensorflow.python.ipu.ops.control_flow_ops": ("barrier",),
    "tensorflow.python.ipu.ops.cross_replica_ops": (
        "assume_equal_across_replicas", "cross_replica_mean", "cross_replica_sum",
    ),
    "tensorflow.python.ipu.ops.custom_ops": ("codelet_expression_op", "cpu_user_operation", "precompiled_user_op"),
    "tensorflow.python.ipu.ops.embedded_runtime": (
        "RuntimeContext", "embedded_runtime_call", "embedded_runtime_start", "embedded_runtime_start_and_call",
        "embedded_runtime_stop",
    ),
    "tensorflow.python.ipu.ops.embedding_ops": (
        "HostEmbedding", "HostEmbeddingOptimizerSpec", "HostEmbeddingSGDGAOptimizerSpec", "create_host_embedding",
        "embedding_lookup",
    ),
    "tensorflow.python.ipu.ops.f8_ops": (
        "Format", "QuarterTensor", "convert_from_f8", "convert_to_f8", "create_metadata", "f8_conv_1d", "f8_conv_2d",
        "f8_conv_3d", "f8_matmul",
    ),
    "tensorflow.python.ipu.ops.functional_ops": ("outlined_function",),
    "tensorflow.python.ipu.ops.grad_util_ops": ("capture_upstream_gradients",),
    "tensorflow.python.ipu.ops.image_ops": ("normalise_image",),
    "tensorflow.python.ipu.ops.internal_ops": (
        "fifo", "get_current_iteration_counter", "print_tensor", "remap", "remap_deduce",
    ),
    "tensorflow.python.ipu.ops.math_ops": ("segment_sum", "serialized_matmul"),
    "tensorflow.python.ipu.ops.nn_ops": (
        "ctc_beam_search_decoder", "ctc_beam_search_decoder_with_log_probs", "ctc_loss_v2", "ctc_loss_with_log_probs",
        "gelu", "hard_sigmoid", "multi_conv", "nce_loss", "sampled_softmax_loss", "softmax", "swish",
    ),
    "tensorflow.python.ipu.ops.normalization_ops": ("group_norm", "instance_norm", "layer_norm"),
    "tensorflow.python.ipu.ops.pipelining_ops": (
        "OptimizerFunctionOutput", "PipelineSchedule", "PipelineStageOptions", "RecomputationMode", "pipeline",
        "recomputation_checkpoint",
    ),
    "tensorflow.python.ipu.ops.rand_ops": ("dropout",),
    "tensorflow.python.ipu.ops.reduce_scatter_op": ("reduce_scatter",),
    "tensorflow.python.ipu.ops.replication_ops": ("replication_index",),
    "tensorflow.python.ipu.ops.slicing_ops": ("sequence_slice", "sequence_slice_pack", "sequence_slice_unpack"),
    "tensorflow.python.ipu.ops.statistics_ops": (
        "fixed_width_bins", "histogram", "histogram_normalize", "histogram_update",
    ),
    "tensorflow.python.ipu.ops.within_replica_ops": ("all_gather", "all_reduce", "reduce_scatter"),
    "keras.ipu": (
        "FunctionalLayerPipelineStageAssignment", "FunctionalNestedModelPipelineStageAssignment",
        "ModelLayerPipelineStageAssignment", "NestedModelPipelineStageAssignment", "PipelineStage",
        "ReplicatedMetricReductionMethod", "SequentialLayerPipelineStageAssignment",
        "SequentialNestedModelPipelineStageAssignment",
    ),
    "keras.ipu.extensions": ("FunctionalExtension", "ModelExtension", "SequentialExtension"),
    "keras.ipu.extensions.data_adapter": ("IPUDataHandler",),
    "keras.ipu.extensions.extensions_base": ("KerasExtensionBase",),
    "keras.ipu.extensions.functional_extensions": ("FunctionalExtension",),
    "keras.ipu.extensions.model_extensions": ("ModelExtension",),
    "keras.ipu.extensions.pipeline_stage_assignment": (
        "FunctionalLayerPipelineStageAssignment", "FunctionalNestedModelPipelineStageAssignment",
        "ModelLayerPipelineStageAssignment", "NestedModelPipelineStageAssignment",
        "SequentialLayerPipelineStageAssignment", "SequentialNestedModelPipelineStageAssignment",
    ),
    "keras.ipu.extensions.sequential_extensions": ("SequentialExtension",),
    "keras.ipu.layers": ("CaptureActivationGradients", "CaptureUpstreamGradients"),
    "keras.ipu.optimizers": (
        "ALSGradientAccumulationOptimizer", "ALSOptimizer", "ALSOptimizerAdam", "ALSOptimizerRMSProp",
        "ALSOptimizerSGD", "GradientAccumulationOptimizer",
    ),
    "ipu_tensorflow_addons.keras.layers": (
        "AssumeEqualAcrossReplicas", "CTCInferenceLayer", "CTCLoss", "CTCPredictionsLayer", "ConvertFromF8",
        "ConvertToF8", "Dense", "Dropout", "EffectiveTransformer", "Embedding", "GRU", "GroupNorm",
        "GroupNormalization", "InstanceNorm", "InstanceNormalization", "LSTM", "LayerNorm", "LayerNormalization",
        "PopnnGRU", "PopnnLSTM", "RecomputationCheckpoint", "SerialDense",
    ),
    "ipu_tensorflow_addons.keras.layers.ipu_layer": ("IPULayer",),
    "ipu_tensorflow_addons.keras.optimizers": (
        "AdamIpuOptimizer", "IpuOptimizerBase", "LAMBIpuOptimizer", "SGDIpuOptimizer",
    ),
    "ipu_tensorflow_addons.v1.layers": (
        "PopnnAUGRU", "PopnnDynamicGRU", "PopnnDynamicLSTM", "PopnnGRU", "PopnnLSTM",
    ),
    "popdist": (
        "checkNumIpusPerReplica", "execute_on_instances", "finalizeBackend", "getDeviceId", "getInstanceIndex",
        "getLocalInstanceIndex", "getNumInstances", "getNumIpusPerReplica", "getNumLocalReplicas",
        "getNumTotalReplicas", "getReplicaIndexOffset", "init", "initializeBackend", "isBackendInitialized",
        "isPopdistEnvSet", "registerBackend", "registerCommunicator", "registerDefaultBackend", "synchronize",
    ),
    "popdist.tensorflow": ("set_ipu_config",),
    "gcipuinfo": ("BoardType", "DiscoverActivePartitionIPUs", "DiscoverAllPartitionIPUs", "IpuPower", "gcipuinfo"),
    "libpvti": ("Tracepoint", "createTraceChannel"),
}  # fmt: skip


# Settings of IPUConfig that change what a program computes or may do. The others are checked and have no effect.
SETTINGS = {
    "auto_select_ipus, select_ipus": "emulated, on a partition of powers of two",
    "device_connection.type": "ALWAYS and ON_DEMAND attach; PRE_COMPILE gives zeros; NEVER refuses to execute",
    "floating_point_behaviour.inv, div0, oflo": "emulated at the results of operations: tf.errors.InternalError",
    "floating_point_behaviour.nanoo": "emulated at the results of operations; without it overflows give infinity",
    "floating_point_behaviour.esr": "not emulated, which is said once: numbers are rounded to the nearest",
    "norms.experimental.distributed_batch_norm_replica_group_size": "emulated for fused batch normalisation",
    "experimental.multi_replica_distribution": "emulated: collectives of the device span all instances",
}


def find(module: str, name: str) -> Any:
    """Returns the object that a program gets for a name of the SDK. The emulator must be installed."""
    return getattr(importlib.import_module(module), name)


def reason_of(value: Any) -> Optional[str]:
    """Returns why something is refused, or None if it is not."""
    return getattr(value, refusal.REASON, None)


def as_markdown() -> str:
    """Returns the table. The emulator must be installed."""
    lines = [
        "# Coverage of the SDK's API by the emulator",
        "",
        "Made by `python -m tf_ipu_dp.emulator.coverage`; do not edit.",
        "",
        "| Module | Emulated | Refused by name, with the reason |",
        "|---|---|---|",
    ]
    for module, names in SDK.items():
        reasons = {name: reason_of(find(module, name)) for name in names}
        emulated = ", ".join(f"`{name}`" for name in names if reasons[name] is None)
        refused: List[str] = []
        for reason in dict.fromkeys(reason for reason in reasons.values() if reason):
            same = ", ".join(f"`{name}`" for name in names if reasons[name] == reason)
            refused.append(f"{same}: {reason}")
        lines.append(f"| `{module}` | {emulated} | {'; '.join(refused)} |")
    lines += ["", "| Setting of `IPUConfig` | On the emulator |", "|---|---|"]
    lines += [f"| `{setting}` | {effect} |" for setting, effect in SETTINGS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    emulator.install()
    print(as_markdown(), end="")
