"""Ways through a jaxpr: what `autocast` and the trace know about equations."""
