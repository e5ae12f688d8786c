"""What a job is before it runs: its topology, its steps, its recipe and its model, and the plan as text.

`plan.plan_run` makes a plan or refuses with fixes that were tried; `relayout` finds other layouts of the same batch.
Pure: no TensorFlow, environment, clock or printing.
"""
