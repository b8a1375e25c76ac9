"""Who holds the others up, and why: rules over the model. Pure."""
