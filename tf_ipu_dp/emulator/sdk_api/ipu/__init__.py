"""`tensorflow.python.ipu` on stock TensorFlow. Its modules, and the modules of ops, are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any, List

_MODULES = (
    "config", "cross_replica_optimizer", "data", "dataset_benchmark", "dataset_extractor", "eager",
    "gradient_accumulation", "gradient_accumulation_optimizer", "ipu_compiler", "ipu_estimator", "ipu_infeed_queue",
    "ipu_multi_worker_strategy", "ipu_optimizer", "ipu_outfeed_queue", "ipu_pipeline_estimator", "ipu_run_config",
    "ipu_session_run_hooks", "ipu_strategy", "keras", "keras_extensions", "loops", "map_gradient_optimizer", "ops",
    "optimizers", "scopes", "serving", "sharded_optimizer", "sharding", "utils", "vertex_edsl",
)  # fmt: skip
_OPS = (
    "all_to_all_op", "application_compile_op", "control_flow_ops", "cross_replica_ops", "custom_ops",
    "embedded_runtime", "embedding_ops", "f8_ops", "functional_ops", "grad_util_ops", "image_ops", "internal_ops",
    "math_ops", "nn_ops", "normalization_ops", "pipelining_ops", "rand_ops", "reduce_scatter_op", "replication_ops",
    "slicing_ops", "statistics_ops", "within_replica_ops",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OPS:
        return importlib.import_module(f"{__name__}.ops.{name}")
    if name == "popfloat_cast_to_gfloat":
        return importlib.import_module(f"{__name__}.ops.experimental.{name}")
    if name == "outlined_function":
        return importlib.import_module(f"{__name__}.ops.functional_ops").outlined_function
    raise AttributeError(f"module 'tensorflow.python.ipu' has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted([*_MODULES, *_OPS, "outlined_function", "popfloat_cast_to_gfloat"])
