"""Public measurements and their replays: what docs/validation.md prints and the accuracy tests hold bounds on."""
