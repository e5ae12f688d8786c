"""`ipu_tensorflow_addons.keras.layers`: the IPU's Keras layers on stock Keras."""

from __future__ import annotations

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers import ipu_layer
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ctc import CTCInferenceLayer, CTCLoss, CTCPredictionsLayer
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.dense import Dense, SerialDense
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.dropout import Dropout
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.effective_transformer import EffectiveTransformer
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.embedding import Embedding
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.f8 import ConvertFromF8, ConvertToF8
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.identity import AssumeEqualAcrossReplicas, RecomputationCheckpoint
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.normalization import (
    GroupNorm,
    GroupNormalization,
    InstanceNorm,
    InstanceNormalization,
    LayerNorm,
    LayerNormalization,
)
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.rnn import GRU, LSTM, PopnnGRU, PopnnLSTM

__all__ = [
    "GRU",
    "LSTM",
    "AssumeEqualAcrossReplicas",
    "CTCInferenceLayer",
    "CTCLoss",
    "CTCPredictionsLayer",
    "ConvertFromF8",
    "ConvertToF8",
    "Dense",
    "Dropout",
    "EffectiveTransformer",
    "Embedding",
    "GroupNorm",
    "GroupNormalization",
    "InstanceNorm",
    "InstanceNormalization",
    "LayerNorm",
    "LayerNormalization",
    "PopnnGRU",
    "PopnnLSTM",
    "RecomputationCheckpoint",
    "SerialDense",
    "ipu_layer",
]
