"""`tensorflow.python.ipu.gradient_accumulation`."""

from __future__ import annotations

import enum
from typing import Union


class GradientAccumulationReductionMethod(enum.Enum):
    """How the gradients of the micro batches of one update are combined."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(
        cls, reduction_method: Union[str, GradientAccumulationReductionMethod]
    ) -> GradientAccumulationReductionMethod:
        """Returns the method of a name or of the enum itself."""
        if isinstance(reduction_method, cls):
            return reduction_method
        if isinstance(reduction_method, str) and reduction_method.upper() in cls.__members__:
            return cls[reduction_method.upper()]
        names = ", ".join(repr(name.lower()) for name in cls.__members__)
        raise ValueError(f"{reduction_method!r} is not a reduction method; it is one of {names}.")
