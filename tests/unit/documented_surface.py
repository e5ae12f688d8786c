"""The SDK's public API as documented (releases 3.1 to 3.4): parameters in order with defaults, enum values, attributes.

Parameters are written as in Python. A default of `...` is not documented. Names that the emulator refuses are left out.
The attributes of `IPUConfig` are in `emulator/sdk_api/test_ipu_config.py`. What is marked "unconfirmed" is not in the
documents that were at hand: compare it with an installed SDK before relying on it.
"""

from __future__ import annotations

from typing import Any, Dict

Signatures = Dict[str, Dict[str, str]]

_IPU = "tensorflow.python.ipu"
_ADDONS = "ipu_tensorflow_addons"
_CONSTRAINTS = "kernel_constraint=None, recurrent_constraint=None, bias_constraint=None, "
_REGULARIZERS = (
    "kernel_regularizer=None, recurrent_regularizer=None, bias_regularizer=None, activity_regularizer=None, "
)
_RECURRENT = (
    "units, activation='tanh', recurrent_activation='sigmoid', use_bias=True, kernel_initializer='glorot_uniform', "
    "recurrent_initializer='orthogonal', bias_initializer='zeros', "
)
_RECURRENT_END = (
    f"{_REGULARIZERS}{_CONSTRAINTS}dropout=0., dropout_seed=None, recurrent_dropout=0., implementation=2, "
    "return_sequences=False, return_state=False, go_backwards=False, stateful=False, unroll=False, "
)
# unconfirmed: the order from dropout_seed on
_RECURRENT_OPTIONS = "seed=None, partials_dtype=tf.float32, time_major=False, options=None, options_bwd=None, **kwargs"
_LSTM = f"{_RECURRENT}unit_forget_bias=True, {_RECURRENT_END}{_RECURRENT_OPTIONS}"
_GRU = f"{_RECURRENT}{_RECURRENT_END}reset_after=True, {_RECURRENT_OPTIONS}"
_NORM = "center=True, scale=True, epsilon=1e-3, beta_initializer=None, gamma_initializer=None"
_GROUP_NORM = f"groups=2, channels_axis=-1, {_NORM}, strided_channel_grouping=True, trainable=True, **kwargs"
_INSTANCE_NORM = f"channels_axis=-1, {_NORM}, trainable=True, **kwargs"
_LAYER_NORM = (
    "axis=-1, epsilon=1e-3, center=True, scale=True, beta_initializer='zeros', gamma_initializer='ones', "
    "beta_regularizer=None, gamma_regularizer=None, beta_constraint=None, gamma_constraint=None, trainable=True, "
    "**kwargs"
)
_NORM_OP = (
    "channels_axis=-1, center=True, scale=True, epsilon=1.53e-5, param_initializers=None, reuse=None, "
    "variables_collections=None, training=True, trainable=True, scope=None"
)
_V1_RECURRENT = (
    "num_units, dtype=tf.float32, partials_dtype=tf.float32, seed=None, weights_initializer=None, "
    "bias_initializer=None, activation='tanh', recurrent_activation='sigmoid', return_state=True, name=None, "
)
_ACCUMULATION = (
    "num_mini_batches, offload_weight_update_variables=None, replicated_optimizer_state_sharding=False, dtype=None, "
    "reduction_method=Reduction.SUM, name=..."
)
_ALS = (
    "initial_loss_scaling_factor=1, update_frequency=8, increase_factor=2, max_loss_scaling_factor=32768, "
    "accumulate_statistics_over_update_period=True, ratio_threshold=1e-5, captured_grads_only=False, lpf_alpha=0.0, "
    "histogram_bin_edge=2**13, name=..."
)
_SERVING = (
    "output_names=None, preprocessing_step=None, preprocessing_step_signature=None, postprocessing_step=None, "
    "postprocessing_step_signature=None, purge_export_dir=False"
)
_USER_OP = "separate_gradients=False, inputs_with_gradients=None, attributes=None, gradient_attributes=None"
_SAMPLED = "weights, biases, labels, inputs, num_sampled, num_classes, num_true=1, sampled_values=None, name=..."
_CTC_DECODER = "beam_width=100, top_paths=1, blank_index=-1, name=None"
_CTC_LAYER = "blank_index=0, beam_width=100, top_paths=1, from_logits=False, **kwargs"
_COLLECTIVES = {
    "allgather": "value, tensor_name=None",
    "allreduce": "value, reduce_op, tensor_name=None",
    "broadcast": "value, root_rank=0, tensor_name=None",
}
_STAGE_ASSIGNMENTS = {
    "FunctionalLayerPipelineStageAssignment": "layer, node_index, pipeline_stage=None",
    "FunctionalNestedModelPipelineStageAssignment": "nested_model, node_index, pipeline_stage_assignments=None",
    "ModelLayerPipelineStageAssignment": "layer, node_index, pipeline_stage=None",
    "NestedModelPipelineStageAssignment": "nested_model, node_index, pipeline_stage_assignments=None",
    "SequentialLayerPipelineStageAssignment": "layer, pipeline_stage=None",
    "SequentialNestedModelPipelineStageAssignment": "nested_model, pipeline_stage_assignments=None",
}
_CONFIG_FUNCTIONS = {
    "configure_ipu_system": "config, device='cpu', reset_configuration=True",
    "get_ipu_config": "session=None",
    "reset_ipu_configuration": "",
    "running_on_ipu_model": "",
}

_OPS = (
    "all_to_all_op application_compile_op control_flow_ops cross_replica_ops custom_ops embedded_runtime embedding_ops "
    "experimental experimental.popfloat_cast_to_gfloat f8_ops functional_ops functional_ops_grad grad_util_ops "
    "image_ops internal_ops math_ops nn_ops normalization_ops op_util pipelining_ops rand_ops reduce_scatter_op "
    "replication_ops slicing_ops statistics_ops within_replica_ops within_replica_ops_grad"
)
_IPU_MODULES = (
    "config cross_replica_optimizer data data.ops data.ops.dataset_ops dataset_benchmark dataset_extractor distributed "
    "distributed.host_collective_ops distributed.popdist_strategy eager eager.backprop gradient_accumulation "
    "gradient_accumulation_optimizer ipu_compiler ipu_estimator ipu_infeed_queue ipu_multi_worker_strategy "
    "horovod horovod.ipu_horovod_strategy horovod.popdist_strategy keras keras.layers keras.optimizers "
    "ipu_optimizer ipu_outfeed_queue ipu_pipeline_estimator ipu_run_config ipu_session_run_hooks ipu_strategy "
    "keras_extensions loops map_gradient_optimizer ops optimizers scopes serving sharded_optimizer sharding utils "
    "vertex_edsl"
)
_EXTENSIONS = (
    "data_adapter extensions_base functional_extensions model_extensions pipeline_stage_assignment "
    "sequential_extensions"
)

MODULES = (
    _IPU,
    *(f"{_IPU}.{name}" for name in _IPU_MODULES.split()),
    *(f"{_IPU}.ops.{name}" for name in _OPS.split()),
    *("keras.ipu", "keras.ipu.extensions", "keras.ipu.layers", "keras.ipu.optimizers"),
    *(f"keras.ipu.extensions.{name}" for name in _EXTENSIONS.split()),
    *(_ADDONS, f"{_ADDONS}.keras.layers", f"{_ADDONS}.keras.layers.ipu_layer", f"{_ADDONS}.keras.optimizers"),
    *(f"{_ADDONS}.v1.layers", f"{_ADDONS}.v1.optimizers"),
    *("popdist", "popdist.tensorflow", "gcipuinfo", "libpvti"),
)

SIGNATURES: Signatures = {
    f"{_IPU}.config": {
        **_CONFIG_FUNCTIONS,
        "IPUConfig": "",
        "IPUConfig.configure_ipu_system": "self, device='cpu'",
        "IPUConfig.from_dict": "self, dct",
        "IPUConfig.from_json": "self, json_cfg",
        "IPUConfig.get_attribute_metadata": "self, attr",
        "IPUConfig.to_dict": "self",
        "IPUConfig.to_json": "self",
        "StochasticRoundingBehaviour.from_bool": "value",
    },
    f"{_IPU}.ipu_strategy": {
        "IPUStrategy": "ipu_device='/device:IPU:0', cpu_device='/device:CPU:0', enable_dataset_iterators=True, "
        "enable_keras_extensions=True",
        "IPUStrategyV1": "ipu_device='/device:IPU:0', cpu_device='/device:CPU:0', enable_dataset_iterators=True, "
        "enable_keras_extensions=True",
        "IPUStrategyV1.run": "self, fn, args=(), kwargs=None, options=None",
    },
    f"{_IPU}.distributed": _COLLECTIVES,
    f"{_IPU}.distributed.host_collective_ops": _COLLECTIVES,
    f"{_IPU}.distributed.popdist_strategy": {
        "PopDistStrategy": "ipu_device='/device:IPU:0', add_ipu_cross_replica_reductions=True, "
        "enable_dataset_iterators=True, enable_keras_extensions=True",
        "PopDistStrategy.run": "self, fn, args=(), kwargs=None, options=None",
        "PopDistStrategy.update_ipu_config": "self, config",
    },
    f"{_IPU}.utils": {
        **_CONFIG_FUNCTIONS,
        "IPUConfig": "",
        "get_num_of_ipus_in_device": "ipu_device, device='cpu'",
        "move_variable_initialization_to_cpu": "graph=None",
        "reset_ipu_seed": "seed, device='/device:IPU:0', cpu_device='cpu', experimental_identical_replicas=False",
        "use_synthetic_data_for": "synthetic_data_category",
    },
    f"{_IPU}.ipu_infeed_queue": {
        "IPUInfeedQueue": "dataset, device_ordinal=None, prefetch_depth=None, optimise_latency=False, **kwargs",
        "IPUInfeedQueue.get_next": "self",
        "IPUIterator": "dataset=None, infeed_spec=None, element_spec=None, **infeed_kwargs",
        "IPUOwnedIterator": "dataset=None, infeed_spec=None, element_spec=None, **infeed_kwargs",
        "IPUOwnedIterator.get_next": "self",
        "IPUOwnedIterator.get_next_as_optional": "self",
        "IPUOwnedIterator.next": "self",
    },
    f"{_IPU}.ipu_outfeed_queue": {
        "IPUOutfeedQueue": "outfeed_mode=None, device_ordinal=None, buffer_depth=3, optimise_latency=False",
        "IPUOutfeedQueue.dequeue": "self, wait_for_completion=False",
        "IPUOutfeedQueue.enqueue": "self, tensors",
        "IPUOutfeedQueueIterator": "outfeed_queue",
        "ScopedIPUOutfeedQueue": "outfeed_mode=None, device_ordinal=None",
    },
    f"{_IPU}.loops": {
        "repeat": "n, body, inputs=None, infeed_queue=None, use_while_v1=True",
        "while_loop": "condition, body, inputs=None, infeed_queue=None, maximum_iterations=None, use_while_v1=True",
    },
    f"{_IPU}.ipu_compiler": {"compile": "computation, inputs=None"},
    f"{_IPU}.scopes": {  # unconfirmed: the names of parameters, except of ipu_jit_scope
        "frontend_attribute": "attribute_name, attribute_value, restore_to=None",
        "ipu_jit_scope": "ipu_scope",
        "ipu_scope": "device",
        "ipu_shard": "index",
        "outside_compilation_scope": "name='outside'",
        "partials_type": "override_type",
        "stochastic_rounding": "override",
    },
    f"{_IPU}.sharding": {  # unconfirmed: parameters
        "dependencies": "roots",
        "enable_sharded_gradient_tape": "",
        "get_shard_from_colocation": "op",
        "get_sharding": "op",
        "has_attr": "o, attr_name",
        "propagate_sharding": "g",
    },
    f"{_IPU}.gradient_accumulation": {"GradientAccumulationReductionMethod.parse": "reduction_method"},
    f"{_IPU}.optimizers": {
        "CrossReplicaGradientAccumulationOptimizer": "opt, num_mini_batches, verify_usage=True, name=...",
        "CrossReplicaGradientAccumulationOptimizerV2": f"opt, {_ACCUMULATION}",
        "CrossReplicaOptimizer": "opt, name=...",
        "GradientAccumulationOptimizer": "opt, num_mini_batches, verify_usage=True, name=...",
        "GradientAccumulationOptimizerV2": f"opt, {_ACCUMULATION}",
        "IpuOptimizer": "opt, name=None",
        "MapGradientOptimizer": "wrapped_optimizer, gradient_mapping_function, name=...",
        "ShardedOptimizer": "optimizer",
    },
    f"{_IPU}.serving": {
        "export_keras": f"model, export_dir, batch_size=None, {_SERVING}",
        "export_pipeline": "computational_stages, export_dir, iterations, inputs=None, device_mapping=None, "
        "pipeline_schedule=None, poplar_options=None, name=None, predict_step_signature=None, input_dataset=None, "
        f"{_SERVING}",
        "export_single_step": "predict_step, export_dir, iterations, predict_step_signature=None, "
        f"input_dataset=None, {_SERVING}",
    },
    f"{_IPU}.dataset_benchmark": {
        "dataset_benchmark": "dataset, number_of_epochs, elements_per_epochs, print_stats=True, "
        "apply_debug_options=True, do_memcpy=True",
        # unconfirmed: that it has no apply_debug_options
        "infeed_benchmark": "infeed_queue, number_of_epochs, elements_per_epochs, print_stats=True, do_memcpy=True",
    },
    f"{_IPU}.data.ops.dataset_ops": {"BufferDataset": "input_dataset, buffer_size"},
    f"{_IPU}.ops.all_to_all_op": {
        "all_gather": "x, replication_factor, name=None",
        "all_to_all": "x, split_dimension, concat_dimension, replication_factor, name=None",
    },
    f"{_IPU}.ops.control_flow_ops": {"barrier": "tensors, insert_barrier_for_gradients=False, name=None"},
    f"{_IPU}.ops.cross_replica_ops": {
        "assume_equal_across_replicas": "tensors, inplace=False",
        "cross_replica_mean": "x, replica_group_size=None, name=None",
        "cross_replica_sum": "x, replica_group_size=None, name=None",
    },
    f"{_IPU}.ops.custom_ops": {
        "codelet_expression_op": "vertex_expression, *args",
        "cpu_user_operation": f"inputs, library_path, outs=None, name='UserOp', op_name='Callback', {_USER_OP}",
        "precompiled_user_op": "inputs, library_path, gp_path='', outs=None, name='UserOp', op_name='Build', "
        f"{_USER_OP}",
    },
    f"{_IPU}.ops.embedding_ops": {
        "HostEmbedding": "name, embedding_tensor, partition_strategy='TOKEN', optimizer_spec=None",
        "HostEmbedding.lookup": "self, indices, clip_indices=True",
        "HostEmbedding.register": "self, session=None",
        "HostEmbeddingOptimizerSpec": "learning_rate, optimizer_name=None",
        "HostEmbeddingSGDGAOptimizerSpec": "learning_rate, accumulation_factor",
        "create_host_embedding": "name, shape, dtype, partition_strategy='TOKEN', optimizer_spec=None, "
        "initializer=None",
        "embedding_lookup": "params, ids, serialization_factor=1, indices_are_sorted=False, name=None",
    },
    f"{_IPU}.eager.backprop": {
        "GradientCaptureContext": "",
        "GradientCaptureTape": "persistent=False, watch_accessed_variables=True",
    },
    f"{_IPU}.ops.f8_ops": {  # unconfirmed: all parameters
        "QuarterTensor": "data, metadata",
        "convert_from_f8": "packed_input, dtype=tf.half, name=None",
        "convert_to_f8": "values, metadata, name=None",
        "create_metadata": "fmt, scale=0",
        "f8_conv_1d": "inputs, filters, strides, padding, data_format=..., dilations=None, name=None",
        "f8_conv_2d": "inputs, filters, strides, padding, data_format=..., dilations=None, name=None",
        "f8_conv_3d": "inputs, filters, strides, padding, data_format=..., dilations=None, name=None",
        "f8_matmul": "lhs, rhs, name=...",
    },
    f"{_IPU}.ops.functional_ops": {
        "outlined_function": "func=None, unique_sharding=False, keep_input_layouts=None, name=None",
    },
    f"{_IPU}.ops.grad_util_ops": {"capture_upstream_gradients": "args, tag=''"},
    f"{_IPU}.ops.image_ops": {"normalise_image": "image, channel_offsets, channel_scales, scale=1, name=None"},
    f"{_IPU}.ops.internal_ops": {
        "fifo": "x, depth, offload=False, name=None",
        "get_current_iteration_counter": "name=None",
        "print_tensor": "input, name=''",
        "remap": "x, name=None",
        "remap_deduce": "x, name=None",
    },
    f"{_IPU}.ops.math_ops": {
        "segment_sum": "data, segment_ids, num_segments, name=None",
        "serialized_matmul": "a, b, serialization_factor, serialization_dimension, transpose_a=False, "
        "transpose_b=False, name=None",
    },
    f"{_IPU}.ops.nn_ops": {
        "ctc_beam_search_decoder": f"logits, logits_lengths, {_CTC_DECODER}",
        "ctc_beam_search_decoder_with_log_probs": f"log_probs, input_lengths, {_CTC_DECODER}",
        "ctc_loss_v2": "labels, logits, label_length, logit_length, blank_index, out_dtype=None, name=None",
        "ctc_loss_with_log_probs": "labels, data, label_length, data_length, blank_index, out_dtype=None, name=None",
        "gelu": "x, approximate=True, name=None",
        "hard_sigmoid": "x, name=None",
        "multi_conv": "func=None, options=None",
        "nce_loss": _SAMPLED,
        "sampled_softmax_loss": f"{_SAMPLED}, seed=None",
        "softmax": "x, stable=False, name=None",
        "swish": "x, name=None",
    },
    f"{_IPU}.ops.normalization_ops": {
        "group_norm": f"inputs, groups=2, {_NORM_OP}, strided_channel_grouping=True",
        "instance_norm": f"inputs, {_NORM_OP}",
        "layer_norm": f"inputs, {_NORM_OP}",
    },
    f"{_IPU}.ops.pipelining_ops": {
        "OptimizerFunctionOutput": "opt, loss, compute_gradients_args=None, compute_gradients_kwargs=None, "
        "apply_gradients_args=None, apply_gradients_kwargs=None, variables=None, tape=None, "
        "gradient_capture_context=None, captured_gradient_outfeed=None",
        "PipelineStageOptions": "convolution_options=None, matmul_options=None, slice_options=None",
        "pipeline": "computational_stages, gradient_accumulation_count=None, gradient_accumulation_dtype=None, "
        "gradient_accumulation_for_captured_grads=True, repeat_count=1, batch_serialization_iterations=1, inputs=None, "
        "infeed_queue=None, outfeed_queue=None, optimizer_function=None, device_mapping=None, pipeline_schedule=None, "
        "recomputation_mode=None, forward_propagation_stages_poplar_options=None, "
        "backward_propagation_stages_poplar_options=None, weight_update_poplar_options=None, "
        "offload_weight_update_variables=None, replicated_optimizer_state_sharding=False, offload_activations=None, "
        "offload_gradient_accumulation_buffers=None, replicated_weight_sharding=None, offload_weights=None, "
        "continuous_weight_updates=False, outfeed_loss=False, accumulate_outfeed=False, accumulate_outfeed_dtype=None, "
        "outfeed_mask=None, reduction_method=Reduction.SUM, name=None",
        "recomputation_checkpoint": "tensors, name=None",
    },
    f"{_IPU}.ops.rand_ops": {"dropout": "x, rate=0.5, noise_shape=None, seed=None, name=None, ref=..."},
    f"{_IPU}.ops.reduce_scatter_op": {
        "reduce_scatter": "x, replication_factor, op='COLLECTIVE_OP_ADD', name=None",
    },
    f"{_IPU}.ops.replication_ops": {"replication_index": "name=None"},
    f"{_IPU}.ops.slicing_ops": {
        "sequence_slice": "dst, src, num_elems, src_offsets, dst_offsets, zero_unused, name=None",
        "sequence_slice_pack": "dst, src, num_elems, dst_offsets, zero_unused, name=None",
        "sequence_slice_unpack": "src, num_elems, src_offsets, total_elements, name=None",
    },
    f"{_IPU}.ops.statistics_ops": {
        "fixed_width_bins": "inputs, n_bins",
        "histogram": "inputs, levels, absolute_of_input=False",
        "histogram_normalize": "hist",
        "histogram_update": "hist, inputs, levels, absolute_of_input=False",
    },
    f"{_IPU}.ops.within_replica_ops": {
        "all_gather": "input_shards, axis=0",
        "all_reduce": "input_shards, op",
        "reduce_scatter": "input_shards, op",
    },
    "keras.ipu": {**_STAGE_ASSIGNMENTS, "PipelineStage": "stage"},
    "keras.ipu.extensions.pipeline_stage_assignment": _STAGE_ASSIGNMENTS,
    "keras.ipu.layers": {
        "CaptureActivationGradients": "layer, tag=None, **kwargs",
        "CaptureUpstreamGradients": "layer, tag=None, **kwargs",
    },
    "keras.ipu.optimizers": {
        "ALSGradientAccumulationOptimizer": f"als_optimizer, {_ACCUMULATION}",
        "ALSOptimizer": f"opt, {_ALS}",
        "ALSOptimizerAdam": f"learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, {_ALS}",
        "ALSOptimizerRMSProp": f"learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False, {_ALS}",
        "ALSOptimizerSGD": f"learning_rate=0.01, momentum=0.0, {_ALS}",
        "GradientAccumulationOptimizer": f"opt, {_ACCUMULATION}",
    },
    f"{_ADDONS}.keras.layers": {
        "AssumeEqualAcrossReplicas": "inplace=False, **kwargs",
        "CTCInferenceLayer": _CTC_LAYER,
        "CTCLoss": "blank_index=0, from_logits=False, **kwargs",
        "CTCLoss.call": "self, labels, data, label_length, data_length",
        "CTCPredictionsLayer": _CTC_LAYER,
        "ConvertFromF8": "dtype=tf.half, **kwargs",
        "ConvertToF8": "**kwargs",
        "Dense": "units, kernel_format=Format.F143, kernel_scale=0, kernel_data_initializer=None, **kwargs",
        "Dropout": "rate, noise_shape=None, seed=None, **kwargs",
        "Embedding": "input_dim, output_dim, embeddings_initializer='uniform', embeddings_regularizer=None, "
        "activity_regularizer=None, embeddings_constraint=None, mask_zero=False, input_length=None, "
        "serialization_factor=1, **kwargs",
        "Embedding.call": "self, inputs, inputs_are_sorted=False, training=None",
        "GRU": _GRU,
        "GroupNorm": _GROUP_NORM,
        "GroupNormalization": _GROUP_NORM,
        "InstanceNorm": _INSTANCE_NORM,
        "InstanceNormalization": _INSTANCE_NORM,
        "LSTM": _LSTM,
        "LayerNorm": _LAYER_NORM,
        "LayerNormalization": _LAYER_NORM,
        "PopnnGRU": _GRU,
        "PopnnLSTM": _LSTM,
        "RecomputationCheckpoint": "**kwargs",
        "SerialDense": "units, serialization_factor, serialization_dimension, activation=None, use_bias=True, "
        "kernel_initializer='glorot_uniform', bias_initializer='zeros', kernel_regularizer=None, "
        "bias_regularizer=None, activity_regularizer=None, kernel_constraint=None, bias_constraint=None, **kwargs",
    },
    f"{_ADDONS}.keras.optimizers": {
        "AdamIpuOptimizer": "learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=False, name='Adam', "
        "m_dtype=None, v_dtype=None, vhat_dtype=None, debiasing=True, **kwargs",
        "IpuOptimizerBase": "name, optimizer_compute_precisions=(tf.float32,), outline_apply_gradients=False, "
        "outline_apply_gradients_kwargs=None, **kwargs",
        # unconfirmed: the position of dtype
        "IpuOptimizerBase.add_slot": "self, var, slot_name, initializer='zeros', shape=None, dtype=None",
        "LAMBIpuOptimizer": "learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay_rate=0.0, "
        "exclude_from_weight_decay=None, exclude_from_layer_adaptation=None, name='LAMB', debiasing=True, "
        "m_dtype=None, v_dtype=None, weight_norm_clip=None, optimizer_compute_precisions=(tf.float32, tf.float32), "
        "**kwargs",
        "SGDIpuOptimizer": "learning_rate=0.01, momentum=0.0, nesterov=False, name='SGD', momentum_accum_dtype=None, "
        "**kwargs",
    },
    f"{_ADDONS}.v1.layers": {
        "PopnnDynamicGRU": f"{_V1_RECURRENT}reset_after=False, options=None, options_bwd=None",
        "PopnnDynamicLSTM": f"{_V1_RECURRENT}options=None, options_bwd=None",
        "PopnnGRU": f"{_V1_RECURRENT}reset_after=False, options=None, options_bwd=None",
        "PopnnLSTM": f"{_V1_RECURRENT}options=None, options_bwd=None",
    },
    "popdist": {
        "checkNumIpusPerReplica": "n",
        "execute_on_instances": "instances, func, *args, **kwargs",
        "finalizeBackend": "",
        "getDeviceId": "ipusPerReplica=0",
        "getInstanceIndex": "",
        "getLocalInstanceIndex": "",
        "getNumInstances": "",
        "getNumIpusPerReplica": "",
        "getNumLocalReplicas": "",
        "getNumTotalReplicas": "",
        "getReplicaIndexOffset": "",
        "init": "",
        "initializeBackend": "",
        "isBackendInitialized": "",
        "isPopdistEnvSet": "",
        "synchronize": "",
    },
    "popdist.tensorflow": {"set_ipu_config": "config, ipus_per_replica=None, configure_device=True"},
    "gcipuinfo": {
        "gcipuinfo": "mode=...",
        "gcipuinfo.checkHealthOfDevices": "self",
        "gcipuinfo.getDevices": "self",
        "gcipuinfo.getDevicesAsJSON": "self",
        "gcipuinfo.getLastAppEventRecord": "self, path",
        "gcipuinfo.getLastAppEventRecordAsJSON": "self, path",
        "gcipuinfo.getNamedAttributeForAll": "self, label",
        "gcipuinfo.getNamedAttributeForDevice": "self, id, label",
        "gcipuinfo.setUpdateMode": "self, refresh",
        "gcipuinfo.updateData": "self",
    },
    "libpvti": {"Tracepoint": "channel, label", "createTraceChannel": "name"},
}
# What releases up to 3.0 had under other names. unconfirmed: the parameters of the collectives.
SIGNATURES[f"{_IPU}.horovod"] = {
    **dict.fromkeys(("init", "local_rank", "local_size", "rank", "shutdown", "size"), ""),
    "allgather": "tensor",
    "allreduce": "tensor, op=None, prescale_factor=1.0, postscale_factor=1.0",
    "broadcast": "tensor, root_rank, name=None",
}
SIGNATURES[f"{_IPU}.horovod.popdist_strategy"] = SIGNATURES[f"{_IPU}.distributed.popdist_strategy"]
SIGNATURES[f"{_IPU}.keras"] = {"PipelineStage": "stage"}
SIGNATURES[f"{_IPU}.keras.layers"] = {
    name: parameters
    for name, parameters in SIGNATURES[f"{_ADDONS}.keras.layers"].items()
    if name not in ("CTCLoss", "CTCLoss.call", "ConvertFromF8", "ConvertToF8", "Dense")
}
SIGNATURES[f"{_IPU}.keras.optimizers"] = {
    "GradientAccumulationOptimizer": SIGNATURES["keras.ipu.optimizers"]["GradientAccumulationOptimizer"]
}

# The methods that Keras models have in the scope of an IPU strategy.
MODEL_METHODS: Dict[str, str] = {
    "export_for_ipu_serving": f"self, export_dir, batch_size=None, {_SERVING}",
    "get_pipeline_stage_assignment": "self",
    "print_pipeline_stage_assignment_summary": "self, line_length=None, print_fn=None",
    "reset_pipeline_stage_assignment": "self",
    "set_asynchronous_callbacks": "self, asynchronous=False",
    "set_gradient_accumulation_options": "self, gradient_accumulation_steps_per_replica=None, "
    "gradient_accumulation_reduction_method='sum', use_v2_gradient_accumulation_optimizer=False, "
    "**gradient_accumulation_optimizer_kwargs",
    "set_infeed_queue_options": "self, **kwargs",
    "set_outfeed_queue_options": "self, **kwargs",
    "set_pipeline_stage_assignment": "self, pipeline_stage_assignment",
    "set_pipelining_options": "self, gradient_accumulation_steps_per_replica=None, device_mapping=None, "
    "accumulate_outfeed=None, gradient_accumulation_reduction_method='sum', **pipelining_kwargs",
    "set_replication_options": "self, replicated_metric_reduction_method='NONE'",
}

_CONNECTION = {"ALWAYS": 0, "ON_DEMAND": 1, "PRE_COMPILE": 3, "NEVER": 2}
_PROFILE = {"NO_PROFILE": 0, "DEVICE_PROFILE": 1, "IPU_PROFILE": 2, "TILE_PROFILE": 3}
_MERGE = {"NO_MERGING": 0, "MERGE": 1, "IF_BENEFICIAL": 2}
_SCHEDULING = {"CHOOSE_BEST": 0, "CLUSTERING": 1, "POST_ORDER": 2, "LOOK_AHEAD": 3, "SHORTEST_PATH": 4}
_ORDER = {"AUTO": 0, "ZIGZAG": 1, "SNAKE": 2, "HOOF": 3}
_REDUCTION = {"SUM": 0, "MEAN": 1, "RUNNING_MEAN": 2}
_IN_CONFIG_AND_UTILS: Dict[str, Dict[str, Any]] = {
    "DeviceConnectionType": _CONNECTION,
    "ExecutionProfileType": _PROFILE,
    "MergeRemoteBuffersBehaviour": _MERGE,
    "SchedulingAlgorithm": _SCHEDULING,
    "SelectionOrder": _ORDER,
}

ENUMS: Dict[str, Dict[str, Dict[str, Any]]] = {
    f"{_IPU}.config": {
        **_IN_CONFIG_AND_UTILS,
        "StochasticRoundingBehaviour": {"OFF": 0, "ON": 1, "REPLICA_IDENTICAL_ONLY": 2},
    },
    f"{_IPU}.utils": {
        **_IN_CONFIG_AND_UTILS,
        # unconfirmed: values
        "SyntheticDataCategory": {"Infeed": 1, "Outfeed": 2, "Seed": 3, "HostEmbedding": 4, "Parameters": 5},
    },
    f"{_IPU}.ipu_outfeed_queue": {"IPUOutfeedMode": {"ALL": "all", "LAST": "get_last"}},
    f"{_IPU}.gradient_accumulation": {"GradientAccumulationReductionMethod": _REDUCTION},
    f"{_IPU}.optimizers": {"GradientAccumulationReductionMethod": _REDUCTION},
    f"{_IPU}.ops.f8_ops": {"Format": {"F143": 1, "F152": 0}},  # unconfirmed: values
    f"{_IPU}.ops.pipelining_ops": {
        "PipelineSchedule": {"Grouped": 0, "Interleaved": 1, "Sequential": 2},
        "RecomputationMode": {  # unconfirmed: values
            "Auto": 1,
            "RecomputeThenBackpropagate": 2,
            "RecomputeAndBackpropagateInterleaved": 3,
        },
    },
    "keras.ipu": {"ReplicatedMetricReductionMethod": {"NONE": 1, "LIST": 2, "SUM": 3, "MEAN": 4}},
}

_LAYER = "is_nested_model layer pipeline_stage"
_NESTED = "is_nested_model nested_model pipeline_stage_assignments"
_ONE_CALL = "inbound_layers node_index"
_STAGE_ATTRIBUTES = {
    "FunctionalLayerPipelineStageAssignment": f"{_LAYER} {_ONE_CALL}",
    "FunctionalNestedModelPipelineStageAssignment": f"{_NESTED} {_ONE_CALL}",
    "ModelLayerPipelineStageAssignment": f"{_LAYER} {_ONE_CALL}",
    "NestedModelPipelineStageAssignment": f"{_NESTED} {_ONE_CALL}",
    "SequentialLayerPipelineStageAssignment": _LAYER,
    "SequentialNestedModelPipelineStageAssignment": _NESTED,
}

# Properties, and names that are neither functions nor classes with parameters of their own.
ATTRIBUTES: Dict[str, Dict[str, str]] = {
    f"{_IPU}.eager.backprop": dict.fromkeys(("GradientCaptureContext", "GradientCaptureTape"), "captured_gradients"),
    f"{_IPU}.horovod": {"Adasum": "", "Average": "", "Sum": ""},
    f"{_IPU}.ipu_infeed_queue": {
        "IPUInfeedQueue": "deleter dequeued initializer number_of_tuple_elements",
        "IPUOwnedIterator": "element_spec",
    },
    f"{_IPU}.ipu_outfeed_queue": {"IPUOutfeedQueue": "deleter enqueued"},
    f"{_IPU}.keras_extensions": {"KerasExtensions": ""},
    f"{_ADDONS}.keras.layers.ipu_layer": {"IPULayer": ""},
    "keras.ipu": {**_STAGE_ATTRIBUTES, "__ipu__built__": ""},
    "keras.ipu.extensions": {"FunctionalExtension": "", "ModelExtension": "", "SequentialExtension": ""},
    "keras.ipu.extensions.extensions_base": {"KerasExtensionBase": ""},  # unconfirmed: the name of the class
    "keras.ipu.extensions.functional_extensions": {"FunctionalExtension": ""},
    "keras.ipu.extensions.model_extensions": {"ModelExtension": ""},
    "keras.ipu.extensions.pipeline_stage_assignment": _STAGE_ATTRIBUTES,
    "keras.ipu.extensions.sequential_extensions": {"SequentialExtension": ""},
    "keras.ipu.optimizers": {
        "ALSOptimizer": "decrease_factor get_scaled_loss histogram loss_scaling_factor normalized_histogram "
        "preprocess_gradients previous_loss_scaling_factor reset update_counter",
    },
    "gcipuinfo": {"BoardType": "", "DiscoverActivePartitionIPUs": "", "DiscoverAllPartitionIPUs": "", "IpuPower": ""},
}

# Every public name in the documents, taken from their text, so that one cannot be missing here and in the emulator.
MENTIONED = (
    "ALSGradientAccumulationOptimizer ALSOptimizer ALSOptimizerSGD AdamIpuOptimizer AssumeEqualAcrossReplicas "
    "BoardType BufferDataset CTCInferenceLayer CTCLoss CTCPredictionsLayer CaptureActivationGradients "
    "CaptureUpstreamGradients ConvertFromF8 ConvertToF8 CrossReplicaGradientAccumulationOptimizerV2 "
    "CrossReplicaOptimizer Dense DeviceConnectionType DiscoverActivePartitionIPUs DiscoverAllPartitionIPUs Dropout "
    "EffectiveTransformer Embedding ExecutionProfileType Format FunctionalExtension "
    "FunctionalLayerPipelineStageAssignment FunctionalNestedModelPipelineStageAssignment GRU "
    "GradientAccumulationOptimizer GradientAccumulationOptimizerV2 GradientAccumulationReductionMethod "
    "GradientCaptureContext GroupNorm GroupNormalization HostEmbedding HostEmbeddingOptimizerSpec "
    "HostEmbeddingSGDGAOptimizerSpec IPUConfig IPUEstimator IPUInfeedQueue IPUIterator IPULayer IPULoggingTensorHook "
    "IPUMultiWorkerStrategyV1 IPUOutfeedMode IPUOutfeedQueue IPUOwnedIterator IPURunConfig IPUStrategy IPUStrategyV1 "
    "InstanceNorm InstanceNormalization IpuOptimizer IpuOptimizerBase IpuOptions IpuPower KerasExtensions LSTM "
    "LayerNorm LayerNormalization MapGradientOptimizer MergeRemoteBuffersBehaviour ModelExtension "
    "ModelLayerPipelineStageAssignment NestedModelPipelineStageAssignment PipelineSchedule PipelineStage "
    "PipelineStageOptions PopDistStrategy PopnnGRU PopnnLSTM RecomputationCheckpoint RecomputationMode "
    "ReplicatedMetricReductionMethod RunConfig SGDIpuOptimizer SchedulingAlgorithm ScopedIPUOutfeedQueue "
    "SelectionOrder SequentialExtension SequentialLayerPipelineStageAssignment "
    "SequentialNestedModelPipelineStageAssignment SerialDense ShardedOptimizer StochasticRoundingBehaviour "
    "SyntheticDataCategory Tracepoint __ipu__built__ all_gather all_reduce all_to_all allgather allreduce "
    "assume_equal_across_replicas barrier broadcast call capture_upstream_gradients checkHealthOfDevices "
    "checkNumIpusPerReplica codelet_expression_op compile configure_ipu_system cpu_user_operation createTraceChannel "
    "create_host_embedding cross_replica_mean cross_replica_sum ctc_beam_search_decoder ctc_loss_v2 "
    "ctc_loss_with_log_probs dataset_benchmark dataset_extractor dequeue dropout embedding_lookup enqueue "
    "execute_on_instances experimental_application_compile_op export_for_ipu_serving export_keras fifo "
    "finalizeBackend fixed_width_bins from_bool from_dict from_json frontend_attribute gcipuinfo gelu getDeviceId "
    "getDevices getDevicesAsJSON getInstanceIndex getLastAppEventRecord getLastAppEventRecordAsJSON "
    "getLocalInstanceIndex getNamedAttributeForAll getNamedAttributeForDevice getNumInstances getNumIpusPerReplica "
    "getNumLocalReplicas getNumTotalReplicas getReplicaIndexOffset get_attribute_metadata "
    "get_current_iteration_counter get_ipu_config get_next get_next_as_optional get_num_of_ipus_in_device "
    "get_pipeline_stage_assignment get_sharding group_norm hard_sigmoid histogram histogram_normalize "
    "histogram_update infeed_benchmark init initializeBackend instance_norm ipu_jit_scope ipu_scope ipu_shard "
    "isBackendInitialized isPopdistEnvSet layer_norm lookup move_variable_initialization_to_cpu multi_conv nce_loss "
    "next normalise_image outlined_function outside_compilation_scope parse partials_type pipeline "
    "precompiled_user_op print_pipeline_stage_assignment_summary print_tensor recomputation_checkpoint reduce_scatter "
    "register registerBackend registerCommunicator registerDefaultBackend remap remap_deduce repeat replication_index "
    "reset_ipu_configuration reset_ipu_seed reset_pipeline_stage_assignment run running_on_ipu_model "
    "sampled_softmax_loss segment_sum sequence_slice serialized_matmul setUpdateMode set_asynchronous_callbacks "
    "set_gradient_accumulation_options set_infeed_queue_options set_ipu_config set_outfeed_queue_options "
    "set_pipeline_stage_assignment set_pipelining_options set_replication_options softmax stochastic_rounding swish "
    "synchronize to_dict to_json updateData update_ipu_config use_synthetic_data_for while_loop"
)
