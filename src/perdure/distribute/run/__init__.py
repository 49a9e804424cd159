"""`strategy.run`: a function for each local replica, eagerly, and what meets in the middle of it.

A call is a loop over the replicas in the thread of the caller. `context` says which replica the code
belongs to. Where a replica meets the others (a collective, a step of an optimizer), `replicas` lets all
of them come to the same point and joins their values once; sums go through the reduction of `step`.
`calls` makes such points of Keras's optimizers, and `distribute/torch/` of PyTorch's.
"""
