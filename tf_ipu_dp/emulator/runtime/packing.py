"""Many small tensors as few: what a loop carries and instances exchange costs by the tensor, not by the byte.

The small ones of a type lie one after the other in a vector. Large ones stay as they are: to copy them would cost
memory.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

_LARGE = 1 << 16  # elements


class Packing:
    """Where tensors of given shapes and types lie. Packed ones come in the same order for the same tensors."""

    def __init__(self, like: Sequence[Any]) -> None:
        self._shapes = [tf.TensorShape(each.shape) for each in like]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        self._alone: List[int] = []
        vectors: Dict[Any, List[int]] = {}
        for place, each in enumerate(like):
            size = self._sizes[place]
            if size is None or size >= _LARGE:
                self._alone.append(place)
            else:
                vectors.setdefault(tf.as_dtype(each.dtype).base_dtype, []).append(place)
        self._vectors = list(vectors.values())
        self._dtypes = [*vectors, *(tf.as_dtype(like[place].dtype).base_dtype for place in self._alone)]

    def pack(self, tensors: Sequence[Any]) -> List[Any]:
        """Returns the vectors, then the tensors that stay alone."""
        flat = tf.constant([-1])

        def flatten(place: int) -> Any:
            if self._shapes[place].rank == 1:
                return tensors[place]
            return tf.raw_ops.Reshape(tensor=tensors[place], shape=flat)

        packed = [tf.concat([flatten(place) for place in places], axis=0) for places in self._vectors]
        return packed + [tensors[place] for place in self._alone]

    def unpack(self, packed: Sequence[Any]) -> List[Any]:
        """Returns what was packed."""
        tensors: List[Any] = [None] * len(self._shapes)
        for places, vector in zip(self._vectors, packed):
            for place, part in zip(places, tf.split(vector, [self._sizes[place] for place in places])):
                shape = self._shapes[place]
                tensors[place] = part if shape.rank == 1 else tf.reshape(part, shape)
        for place, tensor in zip(self._alone, packed[len(self._vectors) :]):
            tensors[place] = tensor
        return tensors

    def dtypes(self) -> List[Any]:
        """Returns the types of the packed tensors."""
        return list(self._dtypes)

    def zeros(self, dtypes: Optional[Sequence[Any]] = None) -> List[Any]:
        """Returns packed zeros, of other types if they are given."""
        sizes = [[sum(self._sizes[place] for place in places)] for places in self._vectors]
        shapes = [*sizes, *(self._shapes[place] for place in self._alone)]
        return [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes or self._dtypes)]
