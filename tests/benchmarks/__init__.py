"""How much CPU simulations cost; run by name, see test_simulate.py."""
