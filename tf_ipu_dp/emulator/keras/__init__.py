"""Keras models on an emulated IPU: replicated and pipelined `fit`, `evaluate`, `predict`; stages; names in Keras."""
