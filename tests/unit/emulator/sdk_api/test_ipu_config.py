"""`ipu.config`, with the exception types of the SDK."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os

import pytest
import tensorflow as tf

from tf_ipu_dp import emulator
from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.config import (
    DeviceConnectionType,
    IPUConfig,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)

DEFAULTS = {
    "auto_select_ipus": [],
    "select_ipus": [],
    "allow_recompute": False,
    "selection_order": SelectionOrder.AUTO,
    "serialization_output_folder": "",
    "compilation_poplar_options": {},
    "gcl_poplar_options": {},
    "device_connection.type": DeviceConnectionType.ALWAYS,
    "device_connection.version": "",
    "device_connection.enable_remote_buffers": False,
    "floating_point_behaviour.inv": False,
    "floating_point_behaviour.div0": False,
    "floating_point_behaviour.oflo": False,
    "floating_point_behaviour.esr": StochasticRoundingBehaviour.OFF,
    "floating_point_behaviour.nanoo": False,
    "floating_point_behaviour.set_all": False,
    "io_tiles.num_io_tiles": 0,
    "io_tiles.place_ops_on_io_tiles": False,
    "io_tiles.available_memory_proportion": 0.9,
    "convolutions.poplar_options": {},
    "matmuls.clear_pass_type": False,
    "matmuls.poplar_options": {},
    "slices.poplar_options": {},
    "pooling.poplar_options": {},
    "norms.use_stable_statistics": False,
    "norms.experimental.distributed_batch_norm_replica_group_size": 1,
    "optimizations.math.fast": False,
    "optimizations.math.dot_strength": True,
    "optimizations.prefetch_data_streams": True,
    "optimizations.combine_embedding_lookups": False,
    "optimizations.combine_matmuls": False,
    "optimizations.enable_graph_outlining": True,
    "optimizations.merge_infeed_io_copies": True,
    "optimizations.maximum_cross_replica_sum_buffer_size": 0,
    "optimizations.maximum_reduce_scatter_buffer_size": 0,
    "optimizations.maximum_inter_ipu_copies_buffer_size": 0,
    "optimizations.maximum_send_recv_cluster_size": 0,
    "optimizations.maximum_reduce_many_buffer_size": 0,
    "optimizations.maximum_all_gather_buffer_size": 0,
    "optimizations.minimum_remote_tensor_size": 128,
    "optimizations.merge_remote_buffers": MergeRemoteBuffersBehaviour.IF_BENEFICIAL,
    "optimizations.enable_gather_simplifier": True,
    "optimizations.triangular_solve_expander_block_size": 0,
    "optimizations.cholesky_block_size": 0,
    "optimizations.enable_fast_math": False,
    "optimizations.enable_dynamic_slice_replacement": True,
    "scheduling.algorithm": SchedulingAlgorithm.CHOOSE_BEST,
    "scheduling.maximum_scheduler_lookahead_depth": 5,
    "scheduling.maximum_scheduler_search_space_size": 64,
    "experimental.always_rearrange_copies_on_the_host": False,
    "experimental.enable_remote_buffer_embedding": False,
    "experimental.enable_prng_stability": False,
    "experimental.multi_replica_distribution.process_index": 0,
    "experimental.multi_replica_distribution.process_count": 0,
    "ipu_model.compile_ipu_code": True,
    "ipu_model.tiles_per_ipu": 0,
    "ipu_model.version": "ipu2",
}


@pytest.fixture(autouse=True)
def _partition_of_16(monkeypatch, emulator_dir):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "16")
    monkeypatch.delenv("TF_POPLAR_FLAGS", raising=False)
    yield
    ipu_config.reset_ipu_configuration()


def get(config, dotted):
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def owners():
    return registry.Partition.from_environment(dict(ipu_config.os.environ)).owners()


def test_every_attribute_has_the_sdk_s_default():
    config = IPUConfig()
    assert {name: config.get_attribute_metadata(name).default for name in DEFAULTS} == DEFAULTS
    assert sorted(config.to_dict()) == sorted(DEFAULTS)
    assert {name: get(config, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("category", "name", "value"),
    [
        ("", "auto_select_ipus", True),
        ("", "auto_select_ipus", tf.constant(1).numpy()),
        ("", "auto_select_ipus", [1, 2.0]),
        ("", "allow_recompute", 1),
        ("io_tiles", "available_memory_proportion", 1),
        ("floating_point_behaviour", "esr", True),
        ("device_connection", "type", "ALWAYS"),
        ("ipu_model", "version", 2),
    ],
)
def test_a_value_of_another_type_is_a_type_error(category, name, value):
    config = IPUConfig()
    with pytest.raises(TypeError, match="must be of type"):
        setattr(get(config, category) if category else config, name, value)


@pytest.mark.parametrize("value", [4, [2, 2], (1, 1)])
def test_the_number_of_ipus_may_be_an_int_a_list_or_a_tuple(value):
    config = IPUConfig()
    config.auto_select_ipus = value
    assert config.auto_select_ipus == value


def test_unknown_names_are_value_errors_with_the_nearest_name():
    config = IPUConfig()
    with pytest.raises(ValueError, match="Did you mean 'auto_select_ipus'"):
        config.auto_select_ipu = 1
    with pytest.raises(ValueError, match="Did you mean"):
        _ = config.io_tiles.num_tiles
    with pytest.raises(ValueError, match="Did you mean"):
        hasattr(config, "nope")


def test_a_category_cannot_be_replaced():
    with pytest.raises(Exception, match="category"):
        IPUConfig().io_tiles = 3


def test_a_deprecated_attribute_warns(caplog):
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        logging.getLogger("tensorflow").propagate = True
        IPUConfig().optimizations.enable_fast_math = True
    assert "math.fast" in caplog.text


def test_two_configs_do_not_share_their_dictionaries():
    one, other = IPUConfig(), IPUConfig()
    one.convolutions.poplar_options["partialsType"] = "half"
    assert other.convolutions.poplar_options == {}


def test_a_config_survives_dict_json_and_deepcopy():
    config = IPUConfig()
    config.auto_select_ipus = 4
    config.floating_point_behaviour.esr = StochasticRoundingBehaviour.ON
    config.matmuls.poplar_options = {"partialsType": "half"}
    for restore in (lambda new: new.from_dict(config.to_dict()), lambda new: new.from_json(config.to_json())):
        new = IPUConfig()
        restore(new)
        assert new.to_dict() == config.to_dict()
        assert new.floating_point_behaviour.esr is StochasticRoundingBehaviour.ON
    twin = copy.deepcopy(config)
    twin.matmuls.poplar_options["partialsType"] = "float"
    assert config.matmuls.poplar_options == {"partialsType": "half"}


def test_a_dictionary_and_json_have_enums_as_integers():
    config = IPUConfig()
    config.device_connection.type = DeviceConnectionType.PRE_COMPILE
    config.scheduling.algorithm = SchedulingAlgorithm.SHORTEST_PATH
    dictionary = config.to_dict()
    assert dictionary == json.loads(config.to_json())
    assert (dictionary["device_connection.type"], dictionary["scheduling.algorithm"]) == (3, 4)
    assert (dictionary["selection_order"], dictionary["optimizations.merge_remote_buffers"]) == (0, 2)


def test_a_dictionary_sets_what_it_has_and_other_keys_are_ignored():
    config = IPUConfig()
    config.allow_recompute = True
    config.from_dict({"device_connection.type": 2, "io_tiles.num_io_tiles": 8, "of_another_release": 1})
    assert config.device_connection.type is DeviceConnectionType.NEVER
    assert (config.io_tiles.num_io_tiles, config.allow_recompute) == (8, True)
    with pytest.raises(TypeError, match="must be of type int"):
        config.from_dict({"io_tiles.num_io_tiles": "8"})
    with pytest.raises(ValueError, match="7 is not a valid DeviceConnectionType"):
        config.from_dict({"device_connection.type": 7})


def test_a_config_as_text_lists_all_settings():
    config = IPUConfig()
    config.auto_select_ipus = 4
    config.matmuls.poplar_options = {"partialsType": "half"}
    lines = str(config).splitlines()
    assert [line.split(" = ")[0] for line in lines] == list(config.to_dict())
    assert lines[0] == "auto_select_ipus = 4"
    assert "matmuls.poplar_options = {'partialsType': 'half'}" in lines
    assert "device_connection.type = DeviceConnectionType.ALWAYS" in lines


def test_metadata_describes_an_attribute():
    metadata = IPUConfig().get_attribute_metadata("io_tiles.num_io_tiles")
    assert (metadata.name, metadata.type, metadata.default, metadata.deprecated) == (
        "io_tiles.num_io_tiles",
        int,
        0,
        False,
    )
    assert metadata.__doc__
    with pytest.raises(TypeError):
        metadata.check_type("4")


def test_configuring_attaches_the_ipus_and_resetting_gives_them_back():
    config = IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    assert config.auto_select_ipus == [4]
    assert [owner.ipus for owner in owners()] == [(0, 1, 2, 3)]
    assert [each.to_dict() for each in ipu_config.get_ipu_config()] == [config.to_dict()]
    ipu_config.reset_ipu_configuration()
    assert owners() == []
    with pytest.raises(RuntimeError):
        ipu_config.get_ipu_config()


def test_an_equal_configuration_stays_attached_and_another_one_is_attached_anew(caplog):
    for changed in (False, True):
        with caplog.at_level(logging.WARNING, "tensorflow"):
            broken(auto_select_ipus=4).configure_ipu_system()
            system = ipu_config.configured_system()
            caplog.clear()
            config = broken(auto_select_ipus=[4])
            config.allow_recompute = changed
            config.configure_ipu_system()
        assert (ipu_config.configured_system() is system) is not changed
        assert [record.getMessage() for record in caplog.records] == (
            ["IPU devices have been configured before; resetting them."] if changed else []
        )
        assert len(owners()) == 1
        ipu_config.reset_ipu_configuration()


def test_what_is_set_after_configuring_is_a_difference_and_has_no_effect_itself():
    config = broken(auto_select_ipus=4)
    config.configure_ipu_system()
    config.auto_select_ipus = 2
    assert ipu_config.configured_system().config.auto_select_ipus == [4]
    config.configure_ipu_system()
    assert [len(owner.ipus) for owner in owners()] == [2]


def test_without_a_reset_only_an_equal_configuration_is_accepted():
    broken(auto_select_ipus=4).configure_ipu_system()
    ipu_config.configure_ipu_system(broken(auto_select_ipus=4), reset_configuration=False)
    with pytest.raises(tf.errors.FailedPreconditionError, match="configured differently already"):
        ipu_config.configure_ipu_system(broken(auto_select_ipus=2), reset_configuration=False)
    assert [len(owner.ipus) for owner in owners()] == [4]


def test_several_devices_and_chosen_ids():
    config = IPUConfig()
    config.auto_select_ipus = [2, 4]
    config.configure_ipu_system()
    assert sorted(len(owner.ipus) for owner in owners()) == [2, 4]
    config = IPUConfig()
    config.select_ipus = 17
    config.configure_ipu_system()
    assert [owner.ipus for owner in owners()] == [(2, 3)]


def test_neither_selection_is_one_ipu():
    IPUConfig().configure_ipu_system()
    assert [owner.ipus for owner in owners()] == [(0,)]


def broken(**changes):
    config = IPUConfig()
    for name, value in changes.items():
        *path, leaf = name.split("__")
        setattr(get(config, ".".join(path)) if path else config, leaf, value)
    return config


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"auto_select_ipus": 1, "select_ipus": 1}, Exception),
        ({"select_ipus": [1, 1]}, ValueError),
        ({"device_connection__type": DeviceConnectionType.PRE_COMPILE}, ValueError),
        ({"device_connection__type": DeviceConnectionType.NEVER}, ValueError),
        ({"io_tiles__place_ops_on_io_tiles": True}, ValueError),
        ({"io_tiles__num_io_tiles": 8,
          "norms__experimental__distributed_batch_norm_replica_group_size": 2}, ValueError),
        ({"norms__experimental__distributed_batch_norm_replica_group_size": 0}, ValueError),
        ({"experimental__multi_replica_distribution__process_count": 2,
          "experimental__multi_replica_distribution__process_index": 2}, ValueError),
        ({"convolutions__poplar_options": {"availableMemoryProportion": 0.2}}, TypeError),
        ({"compilation_poplar_options": {1: "true"}}, TypeError),
        ({"auto_select_ipus": 3}, tf.errors.FailedPreconditionError),
        ({"auto_select_ipus": 32}, tf.errors.FailedPreconditionError),
        ({"select_ipus": 99}, tf.errors.FailedPreconditionError),
        ({"auto_select_ipus": [16, 1]}, tf.errors.InternalError),
    ],
)  # fmt: skip
def test_what_cannot_be_configured_is_refused_with_the_sdk_s_type_and_holds_nothing(changes, error):
    config = broken(**changes)
    with pytest.raises(error):
        config.configure_ipu_system()
    assert owners() == []


def test_the_ipu_model_takes_no_ids_and_no_distribution(monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_model")
    assert ipu_config.running_on_ipu_model()
    with pytest.raises(Exception, match="IPU Model"):
        broken(select_ipus=1).configure_ipu_system()
    with pytest.raises(Exception, match="IPU Model"):
        broken(experimental__multi_replica_distribution__process_count=2).configure_ipu_system()


def test_an_unknown_flag_ends_the_program_before_anything_is_attached(monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_modle")
    with pytest.raises(SystemExit, match="the nearest is --use_ipu_model"):
        broken(auto_select_ipus=2).configure_ipu_system()
    assert owners() == []


def test_tensorflow_lists_the_devices():
    emulator.install()
    importlib.import_module("tensorflow.python.ipu")  # which applies the patch of the lists
    assert [device.name for device in tf.config.list_physical_devices("IPU")] == [
        "/physical_device:IPU:0", "/physical_device:IPU:1",
    ]  # fmt: skip
    broken(auto_select_ipus=4).configure_ipu_system()
    assert [device.name for device in tf.config.list_logical_devices("IPU")] == ["/device:IPU:0"]
    assert len(tf.config.experimental.list_physical_devices("IPU")) == 1
    tf.config.set_visible_devices(tf.config.list_physical_devices())  # which knows the host's devices


def test_on_demand_waits_as_long_as_the_flag_says(monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--on_demand_device_timeout=0")
    other = registry.Partition.from_environment(os.environ).attach(count=16)
    broken(auto_select_ipus=4, device_connection__type=DeviceConnectionType.ON_DEMAND).configure_ipu_system()
    with pytest.raises(tf.errors.OpError):
        ipu_config.configured_system().attach()
    other.release()
    ipu_config.configured_system().attach()
    assert len(owners()) == 1


@pytest.mark.parametrize("by_flag", [False, True])
def test_on_demand_attaches_at_the_first_use_only(monkeypatch, by_flag):
    kind = DeviceConnectionType.ALWAYS if by_flag else DeviceConnectionType.ON_DEMAND
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_on_demand" if by_flag else "")
    broken(auto_select_ipus=4, device_connection__type=kind).configure_ipu_system()
    assert owners() == []
    ipu_config.configured_system().attach()
    assert len(owners()) == 1


@pytest.mark.parametrize("value", ["-0.1", "much"])
@pytest.mark.parametrize("category", ["convolutions", "matmuls", "slices"])
def test_a_negative_share_of_memory_is_refused_when_a_program_is_compiled(category, value):
    broken(**{f"{category}__poplar_options": {"availableMemoryProportion": value}}).configure_ipu_system()
    assert len(owners()) == 1
    strategy = ipu_strategy.IPUStrategy()
    with pytest.raises(
        tf.errors.InternalError, match=rf"{category}\.poplar_options: availableMemoryProportion={value}"
    ):
        strategy.run(tf.function(lambda: tf.constant(1)))
    broken(**{f"{category}__poplar_options": {"availableMemoryProportion": "0.1"}}).configure_ipu_system()
    assert int(strategy.run(tf.function(lambda: tf.constant(1)))) == 1


def test_pre_compile_never_attaches_and_needs_the_executable_cache(monkeypatch):
    connection = {"device_connection__type": DeviceConnectionType.PRE_COMPILE, "device_connection__version": "ipu2"}
    with pytest.raises(tf.errors.FailedPreconditionError, match="--executable_cache_path=DIR in TF_POPLAR_FLAGS"):
        broken(auto_select_ipus=4, **connection).configure_ipu_system()
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--executable_cache_path=cache")
    broken(auto_select_ipus=4, **connection).configure_ipu_system()
    ipu_config.configured_system().attach()
    assert owners() == []
    assert ipu_config.configured_system().ipus_per_device == [4]


def test_something_else_than_a_config_is_a_type_error():
    with pytest.raises(TypeError):
        ipu_config.configure_ipu_system({"auto_select_ipus": 1})
