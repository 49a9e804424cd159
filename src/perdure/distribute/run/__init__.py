"""`strategy.run`: a function for each local replica, eagerly, and what meets in the middle of it.

`context` says which replica the code belongs to. `replicas` lets all come to the same point (a
collective, a step of an optimizer) and joins their values once. `calls` makes such points of
Keras's optimizers, and `distribute/torch/` of PyTorch's.
"""
