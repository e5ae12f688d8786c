"""The emulator has the parameters, defaults and enum values that the SDK documents; see `documented_surface`."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect

import pytest
import tensorflow as tf
from documented_surface import ATTRIBUTES, ENUMS, MENTIONED, MODEL_METHODS, MODULES, SIGNATURES

from tf_ipu_dp import emulator
from tf_ipu_dp.emulator import coverage
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tf_ipu_dp.emulator.sdk_api.ipu.ops import f8_ops

emulator.install()
DEFAULTS = {"tf": tf, "Reduction": GradientAccumulationReductionMethod, "Format": f8_ops.Format}


def entries(table):
    return [(module, name) for module, names in table.items() for name in names]


def find(module, dotted):
    return functools.reduce(getattr, dotted.split("."), importlib.import_module(module))


def documented(parameters):
    """Returns the signature that a line of the table describes."""
    return inspect.signature(eval(f"lambda {parameters}: None", DEFAULTS))


def signature_of(value):
    """Returns how a function or class is called. What a class is made with stands in its first own constructor."""
    if not isinstance(value, type):
        return inspect.signature(value)
    owner = next(cls for cls in value.__mro__ if {"__init__", "__new__"} & set(vars(cls)))
    makes = inspect.signature(vars(owner).get("__init__") or owner.__new__) if owner is not object else documented("_")
    return makes.replace(parameters=list(makes.parameters.values())[1:])


def described(signature, like):
    """Returns parameters as comparable tuples: a default that is not documented counts as any, `*args` has any name."""
    undocumented = {name for name, parameter in like.parameters.items() if parameter.default is ...}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        (
            None if parameter.kind in variable else parameter.name,
            parameter.kind.name,
            ... if parameter.name in undocumented and parameter.default is not parameter.empty else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]


@pytest.mark.parametrize(("module", "name"), entries(SIGNATURES))
def test_functions_and_classes_have_the_documented_parameters_in_order_with_their_defaults(module, name):
    expected = documented(SIGNATURES[module][name])
    assert described(signature_of(find(module, name)), expected) == described(expected, expected)


@pytest.mark.parametrize("name", MODEL_METHODS)
def test_models_on_an_ipu_have_the_documented_methods(scope, name):
    scope(1)  # adds them to Keras
    expected, method = documented(MODEL_METHODS[name]), getattr(tf.keras.Model, name)
    assert described(inspect.signature(method), expected)[1:] == described(expected, expected)[1:]


@pytest.mark.parametrize(("module", "name"), entries(ENUMS))
def test_enums_have_the_documented_members_and_values(module, name):
    found = find(module, name)
    assert issubclass(found, enum.Enum)
    assert {member.name: member.value for member in found} == ENUMS[module][name]


@pytest.mark.parametrize(("module", "name"), entries(ATTRIBUTES))
def test_classes_have_the_documented_attributes(module, name):
    found = find(module, name)
    assert [attribute for attribute in ATTRIBUTES[module][name].split() if not hasattr(found, attribute)] == []


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_imported(name):
    assert inspect.ismodule(importlib.import_module(name))


def test_no_name_of_the_documents_is_missing_from_the_emulator():
    covered = {name for names in coverage.SDK.values() for name in names} | set(MODEL_METHODS) | {"__ipu__built__"}
    members = {part for _, name in entries(SIGNATURES) for part in name.split(".")[1:]}
    assert set(MENTIONED.split()) - covered - members == set()


def test_every_name_that_is_emulated_is_documented_here():
    assert set(coverage.SDK) <= set(MODULES)
    tables = (SIGNATURES, ENUMS, ATTRIBUTES)
    known = {(module, name.split(".")[0]) for table in tables for module, name in entries(table)}
    names = {(module, name) for module, names in coverage.SDK.items() for name in names}
    refused = {(module, name) for module, name in names if coverage.reason_of(coverage.find(module, name))}
    assert names - refused - known == set()
    assert known - names == {("keras.ipu", "__ipu__built__")}
