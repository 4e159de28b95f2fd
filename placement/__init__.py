"""The optimizer: which placement serves the most requests per GPU within the latency targets."""
