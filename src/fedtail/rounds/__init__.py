"""The round loop and what a round is made of: engines, local runs, acceptance, state and checkpoints."""
