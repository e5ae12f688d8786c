"""Refused: the tool divides a model into stages by a profile of the IPU."""

raise ImportError(
    "ipu_tensorflow_addons.keras.experimental.auto_pipeline is not emulated: it divides a model into pipeline stages "
    "by profiles of an IPU. Set the stages with set_pipeline_stage_assignment."
)
