"""What a mixture of experts adds to its matmuls: a row's experts' outputs summed in a given order."""
