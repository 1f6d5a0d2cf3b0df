"""Which outputs of a notebook CI compares with the stored ones."""


def pytest_collectstart(collector):
    """Leaves out how far a long computation is."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
