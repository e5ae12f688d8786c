"""`tensorflow.python.ipu.dataset_extractor`, and the helpers of `ipu.utils` that write or read the same files.

All refused: the files are read by the SDK's own tools, and their format is not public.
"""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WRITES = "it writes a file in a format of the Poplar SDK that is not public"
_READS = "it reads a file in a format of the Poplar SDK that is not public"

dataset_extractor = refused("ipu.dataset_extractor.dataset_extractor", _WRITES)
export_variables = refused("ipu.dataset_extractor.export_variables", _WRITES)
import_variables = refused("ipu.dataset_extractor.import_variables", _READS)

export_dataset_to_file = refused("ipu.utils.export_dataset_to_file", _WRITES)
export_inputs_to_file = refused("ipu.utils.export_inputs_to_file", _WRITES)
export_variables_from_live_session = refused("ipu.utils.export_variables_from_live_session", _WRITES)
export_variables_from_live_model = refused("ipu.utils.export_variables_from_live_model", _WRITES)
import_data_in_live_session = refused("ipu.utils.import_data_in_live_session", _READS)
import_data_in_live_model = refused("ipu.utils.import_data_in_live_model", _READS)

__all__ = [
    "dataset_extractor",
    "export_dataset_to_file",
    "export_inputs_to_file",
    "export_variables",
    "export_variables_from_live_model",
    "export_variables_from_live_session",
    "import_data_in_live_model",
    "import_data_in_live_session",
    "import_variables",
]
