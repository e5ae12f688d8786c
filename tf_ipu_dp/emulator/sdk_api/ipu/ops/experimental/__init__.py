"""`tensorflow.python.ipu.ops.experimental`."""

from tf_ipu_dp.emulator.sdk_api.ipu.ops.experimental import popfloat_cast_to_gfloat

__all__ = ["popfloat_cast_to_gfloat"]
