from __future__ import annotations

import re

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan, report


def plan_words(*words):
    cfg = train_flags.parse(words)
    return plan.plan_run(cfg, info.DATASETS[cfg.dataset])


def test_the_table_and_the_drawing_read_like_this():
    run = plan_words("--dataset=cifar10", "--ipus=8", "--pipeline_stages=2", "--instances=2", "--hosts=a,b")
    text = report.render_plan(run, width=100)
    assert text == (
        "tf_ipu_dp 0.2.0: plan for 4 replicas on 8 IPUs\n"
        "\n"
        "Parameters           549,402  cnn, group norm, 32 x 32 x 3 to 10 classes\n"
        "Training samples      50,000  cifar10\n"
        "IPUs                       8  2 per replica, grouped pipeline of 2 stages\n"
        "Replicas                   4  2 per instance\n"
        "Instances                  2  1 per host\n"
        "Hosts                      2  a, b\n"
        "Global batch             512  samples = micro batch 32 x accumulation 4 x 4 replicas\n"
        "Updates per epoch         97  1 update per execution\n"
        "Dropped per epoch        336  samples that no update takes\n"
        "Updates in all           485  5 epochs\n"
        "Learning rate           0.05  sgd, highest after 48 updates of warm-up, then cosine to 0\n"
        "Validation samples    10,000  each once, in 160 micro batches per instance, 240 padded\n"
        "steps_per_execution        4  for Keras: micro batches of one replica\n"
        "steps_per_epoch          776  for Keras: micro batches of one instance\n"
        "validation_steps         160  for Keras: micro batches of one instance\n"
        "\n"
        "Stage  Work %  Parameters  Blocks\n"
        "    0    48.7       5,136  conv1 to conv2\n"
        "    1    51.3     544,266  conv3 to head\n"
        "\n"
        "╭─ a ──────────────────────╮\n"
        "│ ╭─ instance 0 ─────────╮ │\n"
        "│ │ replica 0  IPU 0 → 1 │ │\n"
        "│ │ replica 1  IPU 2 → 3 │ │\n"
        "│ ╰──────────────────────╯ │\n"
        "╰──────────────────────────╯\n"
        "╭─ b ──────────────────────╮\n"
        "│ ╭─ instance 1 ─────────╮ │\n"
        "│ │ replica 2  IPU 4 → 5 │ │\n"
        "│ │ replica 3  IPU 6 → 7 │ │\n"
        "│ ╰──────────────────────╯ │\n"
        "╰──────────────────────────╯\n"
    )


def test_where_a_stream_cannot_carry_boxes_ascii_is_drawn():
    text = report.render_plan(plan_words("--ipus=4", "--pipeline_stages=2"), width=80, ascii_only=True)
    assert text.isascii() and "| | replica 1  IPU 2 > 3 | |" in text


def test_a_run_of_less_than_an_epoch_says_so():
    text = report.render_plan(plan_words("--ipus=8", "--epochs=3steps", "--micro_batch_size=30"), 100)
    assert "Updates per epoch         34  1 update per execution" in text
    assert "Updates in all             3  3 updates of an epoch" in text


def test_numbers_are_not_cut_on_a_narrow_terminal():
    assert "8,192" in report.render_plan(plan_words("--ipus=8"), 22)


def test_idle_ipus_are_shown():
    drawing = report.render_drawing(plan_words("--ipus=4", "--pipeline_stages=3").topology, 80)
    assert "replica 0  IPU 0 → 1 → 2, 3 idle" in drawing


def test_a_drawing_fits_the_width():
    topology = plan_words("--ipus=32", "--instances=16", "--micro_batch_size=1").topology
    assert max(map(len, report.render_drawing(topology, 80).splitlines())) <= 80


def test_a_large_job_is_summarised_and_its_ends_are_shown():
    run = plan_words("--ipus=1024", "--instances=64", "--hosts=16", "--micro_batch_size=1")
    drawing = report.render_drawing(run.topology, 120)
    assert len(drawing.splitlines()) < 50
    assert "replica 0  IPU 0" in drawing and "replica 1023  IPU 1023" in drawing and "13 more hosts" in drawing
    assert len(report.render_mermaid(run).splitlines()) < 100


def test_the_flowchart_names_everything_once_and_closes_what_it_opens():
    text = report.render_mermaid(plan_words("--ipus=8", "--pipeline_stages=2", "--instances=2"))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "flowchart TB"
    assert sum(line.startswith("subgraph") for line in lines) == lines.count("end") == 1 + 2
    assert 'replica_2["replica 2<br/>IPU 4 → 5"] ~~~ replica_3["replica 3<br/>IPU 6 → 7"]' in lines
    names = re.findall(r"(?:subgraph )?(\w+)\[", text)
    assert len(names) == len(set(names)) == 1 + 1 + 2 + 4
    assert lines[-4:] == [
        "data -->|128 micro batches per epoch| instance_0",
        "data --> instance_1",
        "instance_0 <--> update",
        "instance_1 <--> update",
    ]
