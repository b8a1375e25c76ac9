"""Which ranks hold the others up, and why: rules over the model. Pure."""
