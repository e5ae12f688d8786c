"""Random flags and launches, and the SDK's rules stated differently from the planner: by counting, not by formula."""

from __future__ import annotations

from hypothesis import strategies as st

from tf_ipu_dp.config import train_flags, values
from tf_ipu_dp.planning import plan as planner
from tf_ipu_dp.planning.plan import LaunchedTopology

POWERS = st.integers(0, 10).map(lambda exponent: 2**exponent)
COUNTS = st.one_of(POWERS, st.integers(1, 40))
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "ipus": COUNTS,
        "pipeline_stages": st.integers(1, 9),
        "pipeline_schedule": st.sampled_from(values.SCHEDULES),
        "instances": COUNTS,
        "hosts": st.one_of(st.integers(1, 9).map(str), st.sampled_from(["a", "a,b", "a,b,c", "n1,n2,n3,n4"])),
        "micro_batch_size": st.integers(1, 70),
        "gradient_accumulation": st.integers(1, 40),
        "global_batch_size": st.integers(1, 10_000),
        "device_iterations": st.integers(1, 40),
        "updates_per_epoch": st.integers(1, 300),
        "epochs": st.one_of(st.integers(1, 9).map(str), st.integers(1, 900).map("{}steps".format)),
        "dataset": st.sampled_from(["fashion_mini", "cifar10", "imagenet2012"]),
    },
)
LAUNCHES = st.one_of(
    st.none(),
    st.builds(
        lambda local, instances, per_replica, hosts: LaunchedTopology(
            "poprun", local * instances, per_replica, instances, 0, hosts
        ),
        local=COUNTS,
        instances=COUNTS,
        per_replica=st.one_of(POWERS, st.just(3)),
        hosts=st.one_of(st.none(), st.integers(1, 4)),
    ),
)


def parse_dict(given_flags):
    return train_flags.parse([f"--{name}={value}" for name, value in given_flags.items()])


def assert_obeys_the_rules(run: planner.RunPlan) -> None:
    topology, batch, epochs, validation, keras = run.topology, run.batch, run.epochs, run.validation, run.keras

    # Devices: powers of two, each IPU used once, stages in order on the IPUs of their replica.
    assert bin(topology.ipus).count("1") == 1
    smallest = 1
    while smallest < topology.pipeline_stages:
        smallest *= 2
    assert topology.ipus_per_replica == smallest
    replicas = list(topology.all_replicas())
    assert [ipu for replica in replicas for ipu in replica.ipu_ids] == list(range(topology.ipus))
    assert all(len(replica.ipu_ids) == smallest for replica in replicas)

    # poprun: the same number of replicas in each instance, the same number of instances on each host.
    per_instance = {i: sum(replica.instance == i for replica in replicas) for i in range(topology.instances)}
    assert set(per_instance.values()) == {topology.local_replicas} and topology.local_replicas >= 1
    hosts_of_instances = {replica.instance: replica.host for replica in replicas}
    per_host = [list(hosts_of_instances.values()).count(host) for host in range(topology.hosts.count)]
    assert set(per_host) == {topology.instances_per_host} and topology.instances_per_host >= 1

    # One update: every replica does `accumulation` micro batches.
    assert batch.global_batch_size == sum(batch.micro_batch_size * batch.accumulation for _ in replicas)

    # Pipeline: the compiler's count rule, for training and for evaluation.
    stages, schedule = topology.pipeline_stages, topology.pipeline_schedule
    if stages > 1 and schedule != "sequential":
        count = 2 * stages if schedule == "grouped" else stages
        assert batch.accumulation >= count and batch.accumulation % count == 0
        assert keras.steps_per_execution % stages == 0
        assert keras.validation_steps_per_execution % stages == 0
    blocks = [block for blocks in run.model.stages for block in blocks]
    assert tuple(blocks) == run.model.architecture.blocks
    assert len(run.model.stages) == stages and all(run.model.stages)

    # Keras: steps of an instance -> per replica -> executions -> updates, with no remainder anywhere.
    for steps, per_execution in (
        (keras.steps_per_epoch, keras.steps_per_execution),
        (keras.last_epoch_steps, keras.steps_per_execution),
        (keras.validation_steps, keras.validation_steps_per_execution),
    ):
        assert steps % topology.local_replicas == 0
        assert steps // topology.local_replicas % per_execution == 0
    assert keras.steps_per_epoch > 0
    assert keras.steps_per_execution % batch.accumulation == 0
    assert keras.steps_per_execution // batch.accumulation == epochs.device_iterations
    executions = keras.steps_per_epoch // topology.local_replicas // keras.steps_per_execution
    assert executions == epochs.executions_per_epoch
    trained = epochs.updates_per_epoch if epochs.full_epochs else epochs.last_epoch_updates
    assert executions * epochs.device_iterations == trained
    last = keras.last_epoch_steps // topology.local_replicas // batch.accumulation
    assert last == (epochs.last_epoch_updates or epochs.updates_per_epoch)
    assert epochs.updates == (epochs.epochs - 1) * epochs.updates_per_epoch + last

    # Samples: what an epoch uses and what it drops is the data set.
    assert epochs.dropped_samples_per_epoch >= 0
    assert (run.dataset.train_samples - epochs.dropped_samples_per_epoch) % batch.global_batch_size == 0
    whole = epochs.updates_per_epoch * batch.global_batch_size
    assert whole + epochs.dropped_samples_per_epoch == run.dataset.train_samples
    assert trained * batch.global_batch_size == keras.steps_per_epoch * batch.micro_batch_size * topology.instances

    # Validation: shards are disjoint, complete, and each fits into its instance's slots.
    shards = [validation.shard(instance) for instance in range(topology.instances)]
    assert [sample for shard in shards for sample in shard] == list(range(run.dataset.validation_samples))
    slots = keras.validation_steps * batch.micro_batch_size
    assert all(len(shard) <= slots for shard in shards)
    executions = keras.validation_steps // topology.local_replicas // keras.validation_steps_per_execution
    unit = stages if stages > 1 and schedule != "sequential" else 1
    padded = slots - max(map(len, shards))
    assert padded < batch.micro_batch_size * topology.local_replicas * unit * executions
    assert slots * topology.instances - validation.padded_samples == run.dataset.validation_samples
