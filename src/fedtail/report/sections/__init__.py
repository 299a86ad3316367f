"""The parts of the page; each takes a comparison and the metric that is tested, and returns its blocks."""
