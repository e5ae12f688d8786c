"""Short reviews, good or bad, as numbers of words, and a classifier with an embedding."""

import numpy as np
import tensorflow as tf

import tf_ipu_dp

GOOD = ["great", "lovely", "excellent", "charming", "brilliant", "warm", "funny", "clever"]
BAD = ["awful", "boring", "terrible", "clumsy", "dreadful", "cold", "dull", "stupid"]
OTHER = [
    "the",
    "a",
    "film",
    "book",
    "story",
    "it",
    "was",
    "and",
    "i",
    "found",
    "ending",
    "plot",
    "actor",
    "scene",
    "very",
    "quite",
    "rather",
]
LENGTH = 12


def load():
    random = np.random.RandomState(5)
    vocabulary = {word: number for number, word in enumerate(sorted({*GOOD, *BAD, *OTHER}), 1)}

    def make(count):
        labels = random.randint(0, 2, count)
        numbers = np.zeros([count, LENGTH], np.int32)  # 0 fills up short sentences
        for row, label in enumerate(labels):
            words = list(random.choice(OTHER, random.randint(5, LENGTH - 1)))
            words.insert(random.randint(len(words)), random.choice(GOOD if label else BAD))
            numbers[row, : len(words)] = [vocabulary[word] for word in words]
        return numbers, labels

    return tf_ipu_dp.Data(make(2000), make(401), class_names=["bad", "good"], facts={"vocabulary": len(vocabulary) + 1})


def build(input_shape, classes, vocabulary):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input(input_shape, dtype="int32"),
            layers.Embedding(vocabulary, 16),
            layers.Conv1D(32, 3, padding="same", activation="relu"),
            layers.GlobalMaxPooling1D(),
            layers.Dense(classes, activation="softmax"),
        ]
    )
