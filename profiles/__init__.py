"""What is known about models on GPUs: latency profiles, how they are made and found."""
