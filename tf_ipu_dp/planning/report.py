"""A plan as a table, a drawing or a mermaid flowchart. Pure: returns text, prints nothing."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

from tf_ipu_dp import __version__, cli
from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.plan import ModelPlan, Recipe, Replica, RunPlan, Topology

_MAX_REPLICAS_SHOWN = 32
_MAX_STAGES_IN_A_LINE = 8
_FILE_WIDTH = 200


def render_plan(plan: RunPlan, width: Optional[int], ascii_only: bool = False, drawing: bool = True) -> str:
    """Returns the plan for a person: its numbers, each with its origin, and a drawing of hosts, instances and IPUs."""
    text = f"tf_ipu_dp {__version__}: plan for {_describe_topology(plan.topology)}\n\n"
    text += cli.render_table(("", "", ""), _make_rows(plan), width, right=(1,))
    if plan.dataset.taken_for:
        text += f"\n{cli.wrap(_describe_data(plan), width)}\n"
    if plan.topology.pipeline_stages > 1:
        text += "\n" + _render_stages(plan.model, width)
    text += "\n" + render_drawing(plan.topology, width or _FILE_WIDTH) if drawing else ""
    text += "".join(f"\n{cli.wrap(f'note: {note}', width)}\n" for note in plan.notes)
    return _to_ascii(text) if ascii_only else text


def render_summary(plan: RunPlan) -> str:
    """Returns the plan in five lines at most, for the beginning of a run."""
    architecture, epochs, stages = plan.model.architecture, plan.epochs, plan.topology.pipeline_stages
    norm = f", {architecture.norm} norm" if architectures.has_norm(architecture) and not architecture.own else ""
    pipeline = f", {plan.topology.pipeline_schedule} pipeline of {stages} stages" if stages > 1 else ""
    lines = [
        f"Model: {architecture.name}, {architecture.parameters:,} parameters{norm}{pipeline}",
        _describe_data(plan),
        f"{cli.count(epochs.updates, 'update')}, {epochs.updates_per_epoch:,} per epoch, "
        f"{cli.count(epochs.device_iterations, 'update')} per execution; "
        f"learning rate {plan.recipe.learning_rate:g}, {_describe_recipe(plan.recipe)}",
        *(f"note: {note}" for note in plan.notes[:2]),
    ]
    if len(plan.notes) > 2:
        lines[-1] = f"note: there are {len(plan.notes) - 1} more; --dry_run shows them."
    return "\n".join(lines)


def _describe_data(plan: RunPlan) -> str:
    """Returns a line about the data: what it was taken for, and how many samples there are."""
    taken_for = plan.dataset.taken_for and f" ({plan.dataset.taken_for})"
    samples = f"{plan.dataset.train_samples:,} training and {plan.validation.samples:,} validation samples"
    return f"Data: {plan.dataset.name}{taken_for}, {samples}"


def render_mermaid(plan: RunPlan, ascii_only: bool = False) -> str:
    """Returns a mermaid flowchart: where the data goes, what computes, and where the gradients are combined."""
    topology = plan.topology
    data = f"{plan.dataset.name}<br/>{plan.dataset.train_samples:,} samples"
    gradients = f"gradients of {cli.count(topology.replicas, 'replica')}"
    update = f"{gradients}<br/>one update per {plan.batch.global_batch_size:,} samples"
    lines = ["flowchart TB", f'  data[("{data}")]', f'  update(["{update}"])']
    drivers = []
    for host in _indices_to_show(topology.hosts.count, topology):
        if isinstance(host, range):
            lines.append(f'  more_hosts["{cli.count(len(host), "more host")}"]')
            drivers.append("more_hosts")
            continue
        lines.append(f'  subgraph host_{host}["{topology.host_name(host)}"]')
        for instance in _indices_to_show(topology.instances_per_host, topology, host * topology.instances_per_host):
            if isinstance(instance, range):
                name = f"more_instances_{host}"
                lines.append(f'    {name}["{cli.count(len(instance), "more instance")}"]')
            else:
                name = f"instance_{instance}"
                lines += _mermaid_instance(topology, instance)
            drivers.append(name)
        lines.append("  end")
    each = f"{cli.count(plan.keras.steps_per_epoch, 'micro batch', 'micro batches')} per epoch"
    edges = [f"  data -->|{each}| {drivers[0]}", *(f"  data --> {name}" for name in drivers[1:])]
    text = "\n".join([*lines, *edges, *(f"  {name} <--> update" for name in drivers)]) + "\n"
    return _to_ascii(text) if ascii_only else text


def render_drawing(topology: Topology, width: int) -> str:
    """Returns boxes of hosts, instances, replicas and IPUs; repetitions are summarised."""
    blocks: List[List[str]] = []
    for host in _indices_to_show(topology.hosts.count, topology):
        if isinstance(host, range):
            blocks.append([f"  ⋮ {cli.count(len(host), 'more host')} like these"])
            continue
        instances: List[List[str]] = []
        for instance in _indices_to_show(topology.instances_per_host, topology, host * topology.instances_per_host):
            if isinstance(instance, range):
                instances.append(["", f"… {len(instance):,} more …"])
            else:
                instances.append(_box(f"instance {instance}", _replica_lines(topology, instance)))
        blocks.append(_box(topology.host_name(host), _side_by_side(instances, width - 4)))
    return "".join(line.rstrip() + "\n" for block in blocks for line in block)


def _describe_topology(topology: Topology) -> str:
    words = f"{cli.count(topology.replicas, 'replica')} on {cli.count(topology.ipus, 'IPU')}"
    return f"{words}, as {topology.launcher} started it" if topology.launcher else words


def _make_rows(plan: RunPlan) -> List[Tuple[str, str, str]]:
    topology, batch, epochs, validation, keras = plan.topology, plan.batch, plan.epochs, plan.validation, plan.keras
    stages = topology.pipeline_stages
    pipeline = f", {topology.pipeline_schedule} pipeline of {stages} stages" if stages > 1 else ""
    idle = f", {topology.idle_ipus:,} idle" if topology.idle_ipus else ""
    replicas = cli.count(batch.replicas, "replica")
    product = f"micro batch {batch.micro_batch_size:,} x accumulation {batch.accumulation:,} x {replicas}"
    parts = [cli.count(epochs.full_epochs, "epoch")] if epochs.full_epochs else []
    parts += [f"{cli.count(epochs.last_epoch_updates, 'update')} of an epoch"] if epochs.last_epoch_updates else []
    slots = f"{cli.count(keras.validation_steps, 'micro batch', 'micro batches')} per instance"
    architecture = plan.model.architecture
    norm = f"{architecture.norm} norm, " if architectures.has_norm(architecture) and not architecture.own else ""
    rows: List[Tuple[str, Union[int, float], str]] = [
        (
            "Parameters",
            architecture.parameters,
            f"{architecture.name}, {norm}{architecture.describe_shape()}",
        ),
        ("Training samples", plan.dataset.train_samples, plan.dataset.name),
        ("IPUs", topology.ipus, f"{topology.ipus_per_replica:,} per replica{pipeline}{idle}"),
        ("Replicas", topology.replicas, f"{topology.local_replicas:,} per instance"),
        ("Instances", topology.instances, f"{topology.instances_per_host:,} per host"),
        ("Hosts", topology.hosts.count, ", ".join(topology.hosts.names)),
        ("Global batch", batch.global_batch_size, f"samples = {product}"),
        (
            "Updates per epoch",
            epochs.updates_per_epoch,
            cli.count(epochs.device_iterations, "update") + " per execution",
        ),
        ("Dropped per epoch", epochs.dropped_samples_per_epoch, "samples that no update takes"),
        ("Updates in all", epochs.updates, " and ".join(parts)),
        ("Learning rate", plan.recipe.learning_rate, _describe_recipe(plan.recipe)),
        ("Validation samples", validation.samples, f"each once, in {slots}, {validation.padded_samples:,} padded"),
        ("steps_per_execution", keras.steps_per_execution, "for Keras: micro batches of one replica"),
        ("steps_per_epoch", keras.steps_per_epoch, "for Keras: micro batches of one instance"),
        ("validation_steps", keras.validation_steps, "for Keras: micro batches of one instance"),
    ]
    return [(name, f"{number:,}" if isinstance(number, int) else f"{number:g}", words) for name, number, words in rows]


def _render_stages(model: ModelPlan, width: Optional[int]) -> str:
    rows = [
        (
            str(stage),
            f"{100 * model.share(stage):.1f}",
            f"{sum(block.parameters for block in blocks):,}",
            blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} to {blocks[-1].name}",
        )
        for stage, blocks in enumerate(model.stages)
    ]
    return cli.render_table(("Stage", "Work %", "Parameters", "Blocks"), rows, width, right=(0, 1, 2))


def _describe_recipe(recipe: Recipe) -> str:
    words = {"constant": "then constant", "step": f"then a tenth at {cli.alternatives(recipe.drops)}"}
    course = words.get(recipe.schedule, f"then {recipe.schedule} to 0")
    warmup = f"highest after {cli.count(recipe.warmup_updates, 'update')} of warm-up, " if recipe.warmup_updates else ""
    return f"{recipe.optimizer}, {warmup}{course if warmup else course.replace('then ', '')}"


def _indices_to_show(count: int, topology: Topology, first: int = 0) -> List[Any]:
    """Returns all indices from `first` on, or the first two, the range of the omitted ones, and the last."""
    if topology.replicas <= _MAX_REPLICAS_SHOWN or count <= 4:
        return list(range(first, first + count))
    return [first, first + 1, range(first + 2, first + count - 1), first + count - 1]


def _replicas_to_show(topology: Topology, instance: int) -> List[Any]:
    return _indices_to_show(topology.local_replicas, topology, instance * topology.local_replicas)


def _replica_lines(topology: Topology, instance: int) -> List[str]:
    lines = []
    for index in _replicas_to_show(topology, instance):
        if isinstance(index, range):
            lines.append(f"⋮ {len(index):,} more")
        else:
            lines.append(f"replica {index}  IPU {_describe_ipus(topology.replica(index), topology.pipeline_stages)}")
    return lines


def _describe_ipus(replica: Replica, stages: int) -> str:
    used, idle = [str(ipu) for ipu in replica.ipu_ids[:stages]], replica.ipu_ids[stages:]
    if len(used) > _MAX_STAGES_IN_A_LINE:
        used = [*used[:2], "…", used[-1]]
    text = " → ".join(used)
    if idle:
        text += f", {idle[0]} idle" if len(idle) == 1 else f", {idle[0]} to {idle[-1]} idle"
    return text


def _mermaid_instance(topology: Topology, instance: int) -> List[str]:
    nodes = []
    for index in _replicas_to_show(topology, instance):
        if isinstance(index, range):
            nodes.append(f'more_replicas_{instance}["{cli.count(len(index), "more replica")}"]')
        else:
            words = _describe_ipus(topology.replica(index), topology.pipeline_stages)
            nodes.append(f'replica_{index}["replica {index}<br/>IPU {words}"]')
    # Invisible links keep the replicas in order, one below the other.
    title = f'    subgraph instance_{instance}["instance {instance}"]'
    return [title, "      direction TB", "      " + " ~~~ ".join(nodes), "    end"]


def _box(title: str, lines: Sequence[str]) -> List[str]:
    inner = max([len(title) + 2, *map(len, lines)])
    return [
        f"╭─ {title} {'─' * (inner - len(title) - 1)}╮",
        *[f"│ {line:<{inner}} │" for line in lines],
        f"╰{'─' * (inner + 2)}╯",
    ]


def _side_by_side(blocks: Sequence[Sequence[str]], width: int) -> List[str]:
    """Puts blocks of lines beside each other, as many as fit the width, and the others below."""
    rows: List[List[Sequence[str]]] = [[]]
    used = 0
    for block in blocks:
        size = max(map(len, block)) + 1
        if rows[-1] and used + size > width + 1:
            rows.append([])
            used = 0
        rows[-1].append(block)
        used += size
    lines = []
    for row in rows:
        widths = [max(map(len, block)) for block in row]
        for number in range(max(map(len, row))):
            cells = [block[number] if number < len(block) else "" for block in row]
            lines.append(" ".join(f"{cell:<{size}}" for cell, size in zip(cells, widths)))
    return lines


def _to_ascii(text: str) -> str:
    return text.translate(str.maketrans("╭╮╰╯─│→⋮", "++++-|>:")).replace("…", "...")
