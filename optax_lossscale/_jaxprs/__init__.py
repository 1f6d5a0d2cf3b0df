"""Ways through a jaxpr, which `autocast` and the trace share."""
