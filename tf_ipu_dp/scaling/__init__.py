"""The scaling study: runs training at several sizes, and says how well it scales, where the rest went, what to change.

`python -m tf_ipu_dp.scaling` is the command. Records, arithmetic and prediction are pure; `runner` starts processes;
`engines/` has the programs that training is compared with. Nothing here trains by itself or imports TensorFlow.
"""
