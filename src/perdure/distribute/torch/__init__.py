"""The PyTorch engine and its strategies; a user imports `perdure.torch`."""
