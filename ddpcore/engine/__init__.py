"""The training loop around a user's model: `Engine` in `ddpcore.engine.engine`, and the parts it is made of."""
