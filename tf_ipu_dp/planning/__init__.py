"""Planning a job before it runs: its topology, steps, recipe and model, and the plan as text.

`plan.plan_run` makes a plan, or raises PlanError with tested fixes; `relayout` finds other layouts of the same batch.
Pure: no TensorFlow, environment, clock or printing.
"""
